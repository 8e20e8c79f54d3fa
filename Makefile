# Everything a developer runs. `make demo` and `make test` work on a fresh Debian 12 machine, as root.

PERIGEE_SCALE ?= 0.05
ROUNDS ?= 5

.PHONY: setup build package image demo demo-burst test test-packages test-pages test-upgrade test-qemus alpine btrfs slurm faults soak fuzz lint bench experiments clean

## Install the Debian packages that are missing
setup:
	scripts/setup

## Build the release binary, and beside it the program that runs jobs in guests of other images
build: setup
	PERIGEE_COMMIT=$$(git describe --always --exclude='*' --abbrev=12 --dirty 2>/dev/null) \
	  cargo build --release --locked --package perigee
	cargo rustc --release --locked --package perigee-runner -- -C target-feature=+crt-static

## The Debian package; prints where it is
package: build
	@scripts/package

## Build the golden image once; prints where it is
image: setup
	scripts/golden-image

## A running VM goes to its data: the whole system on this machine
demo: setup
	@experiments/demo/run --scale-factor $(PERIGEE_SCALE) --out out/demo

## A queue that is long for two small hosts, and the rule that rents hosts for it
demo-burst: setup
	@experiments/demo-burst/run --jobs 24 --part 5 --out out/demo-burst

## All tests: unit, property, and the whole system with QEMU
test: setup
	scripts/test

## The package on three machines that systemd boots: from nothing to a job, a reboot, an upgrade under a VM, a purge. Its program is the one
## that `make test` has built
test-packages: setup
	scripts/golden-image >/dev/null
	cargo test --quiet --locked --workspace --test operator --no-run
	package=$$(scripts/package --program "$${CARGO_TARGET_DIR:-target}/debug/perigee" --out out/debug) && scripts/test-packages "$$package"

## The pages in Debian's Chromium, with 20 hosts made of memory and 500 VMs; some minutes. Pictures of the pages: out/pages
test-pages: setup
	scripts/test-pages

## Daemons of this version and of the one that scripts/upgrade-from names, in one cluster, and back again; builds the older one first
test-upgrade: setup
	image=$$(scripts/golden-image) old=$$(scripts/old-perigee) && \
	PATH=$$(scripts/tools):$$PATH PERIGEE_TEST_IMAGE=$$image PERIGEE_TEST_OLD=$$old \
	  cargo nextest run --locked --workspace --run-ignored only -E 'test(a_cluster_is_upgraded)'

## A VM with all devices moves between a host with Debian 12's QEMU 7.2 and one with Debian 13's 10.0, both ways
test-qemus: setup
	image=$$(scripts/golden-image) cloud=$$(scripts/cloud-image) debian13=$$(scripts/debian13) && \
	PATH=$$(scripts/tools):$$PATH PERIGEE_TEST_IMAGE=$$image PERIGEE_TEST_CLOUD_IMAGE=$$cloud PERIGEE_TEST_DEBIAN13=$$debian13 \
	  cargo nextest run --locked --workspace --run-ignored only --no-capture -E 'test(between_qemu_7_2)'

## Jobs and a VM in a cloud image without systemd, bash and glibc. Under emulation it boots too slowly for `make test`
alpine: setup
	scripts/setup python3-pip
	image=$$(scripts/golden-image) alpine=$$(scripts/cloud-image alpine) && \
	PATH=$$(scripts/tools):$$PATH PERIGEE_TEST_IMAGE=$$image PERIGEE_TEST_ALPINE_IMAGE=$$alpine \
	  cargo nextest run --locked --workspace --run-ignored only --test-threads 1 -E 'test(an_alpine_image)'

## A job of Slurm in a VM that is a node, and a node that is not up in time, with a cloud image that has slurmd; some minutes
slurm: setup
	image=$$(scripts/golden-image) cloud=$$(scripts/cloud-image) && \
	PATH=$$(scripts/tools):$$PATH PERIGEE_TEST_IMAGE=$$image PERIGEE_TEST_CLOUD_IMAGE=$$cloud \
	  cargo nextest run --locked --workspace --run-ignored only -E 'test(a_job_of_slurm)'

## A job and a VM whose root is on btrfs and smaller than its disk
btrfs: setup
	scripts/setup btrfs-progs
	image=$$(scripts/golden-image) btrfs=$$(scripts/cloud-image btrfs) && \
	PATH=$$(scripts/tools):$$PATH PERIGEE_TEST_IMAGE=$$image PERIGEE_TEST_BTRFS_IMAGE=$$btrfs \
	  cargo nextest run --locked --workspace --run-ignored only -E 'test(a_root_on_btrfs_becomes)'

## Each fault in each phase of each placement, some 200 cells in about an hour: out/faults/report.html. It goes on where
## an earlier run has stopped; ONLY="copy,filling remote" runs these cells again
faults: setup
	experiments/faults/run --out out/faults $(foreach cells,$(ONLY),--only $(cells))

## What `make test` does a little of, for some half an hour: power cuts, faults, kills under fio; and
## a lab in which daemons are killed and the WAN is cut while jobs and moves go on, for SOAK_LENGTH
SOAK_LENGTH ?= 1h
soak: setup
	PERIGEE_POWER_CASES=200 cargo test --release --locked --package perigee-store
	PATH=$$(scripts/tools):$$PATH PERIGEE_EVERY_WRITE=1 cargo nextest run --locked --workspace -E 'test(gangs::killed)'
	PERIGEE_KILLS=50 cargo test --release --locked --package perigee-volume --test whole -- kills --nocapture
	cargo build --release --locked --package perigee
	scripts/iotests target/release/perigee
	image=$$(scripts/golden-image) && \
	PERIGEE_SERVER_AWAY_S=150 PERIGEE_TEST_IMAGE=$$image cargo test --release --locked --package perigee \
	  --test network_boot -- machines_without_disks && \
	for over in iscsi nbd; do \
	  target/release/perigee lab run boot-storm --over $$over --image $$image --out out/soak-$$over || exit 1; \
	done && \
	target/release/perigee lab run soak --length $(SOAK_LENGTH) --image $$image --out out/soak

## Fuzz what reads bytes from a network or a damaged disk, each for FUZZ_SECONDS. Needs cargo-fuzz
FUZZ_SECONDS ?= 600
FUZZ_TARGETS ?= handshake transmission nbd_client map_files catalog iscsi_login iscsi_session \
  guest_channel guest_messages tar_streams qmp http_requests http_ranges sftp_packets input_lists
fuzz:
	cd fuzz && for target in $(FUZZ_TARGETS); do \
	  RUSTC_BOOTSTRAP=1 cargo fuzz run --sanitizer none $$target corpus/$$target seeds/$$target -- \
	    -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=2048 || exit 1; \
	done

## Formatting, lints, the dependencies, the versions of the committed runs, how well systemd's units confine the daemons, the Python client beside the API's document, and the file
## names and the picture of the crates in ARCHITECTURE.md
# A check of the fuzz targets links nothing, so libFuzzer itself is not compiled for it.
lint: setup
	scripts/check-architecture
	scripts/check-units
	scripts/check-runs
	clients/python/generate --check
	cargo fmt --all --check
	PATH=$$(scripts/tools):$$PATH cargo deny --locked check bans licenses sources
	cargo clippy --locked --workspace --all-targets -- -D warnings
	CUSTOM_LIBFUZZER_PATH=/dev/null cargo check --locked --quiet --manifest-path fuzz/Cargo.toml --target-dir target
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --locked --workspace --no-deps --document-private-items --quiet

## One of experiments/: its results.json and report.html, from the code beside them. QUICK=1 only shows that it works
experiments: build
	@test -x experiments/$(NAME)/run || { echo "which one? make experiments NAME=boot-storm" >&2; exit 2; }
	experiments/$(NAME)/run $(if $(QUICK),--quick --out out/$(NAME))

## The volume server beside its peers: experiments/engine/results.json and report.html. QUICK=1 only shows that it works
bench: build
	scripts/setup nbdkit qemu-system-common
	cargo build --release --locked --package perigee-engine-bench
	target/release/perigee-engine-bench run --rounds $(ROUNDS) \
	  $(if $(QUICK),--quick --out out/bench,--out experiments/engine)
