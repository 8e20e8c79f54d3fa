# Everything a developer runs. `make demo` and `make test` work on a fresh Debian 12 machine, as root.

PERIGEE_SCALE ?= 0.1

.PHONY: setup build image demo test lint bench clean

## Install the Debian packages that are missing
setup:
	scripts/setup

## Build the release binary
build: setup
	cargo build --release --locked

## Build the golden image once; prints where it is
image: setup
	scripts/golden-image

## A running VM goes to its data: the whole system on this machine
demo: build
	@image=$$(scripts/golden-image) && \
	exec target/release/perigee lab demo --image $$image/debian-pg.raw --kernel $$image/vmlinuz \
	  --scale-factor $(PERIGEE_SCALE) --out out/demo

## All tests: unit, property, and the whole system with QEMU
test: setup
	cargo test --locked --workspace --exclude perigee
	cargo build --locked --package perigee
	image=$$(scripts/golden-image) && PERIGEE_TEST_IMAGE=$$image \
	  cargo test --locked --package perigee -- --test-threads=1 --nocapture

## Formatting and lints
lint:
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --locked --workspace --no-deps --document-private-items --quiet

## Our NBD server beside qemu-nbd, alternating: medians and ratios
bench: build
	bench/nbd
