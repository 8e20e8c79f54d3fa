#!/bin/sh
# Runs in the guest: fills a volume with data that no query reads. It is 32 copies of the same noise, which is cheap to make.
set -eu
head -c 16M /dev/urandom >/tmp/noise
copy=1
while [ $copy -le 32 ]; do
    dd if=/tmp/noise of=/data/part-$copy bs=4M oflag=direct status=none
    copy=$((copy + 1))
done
sync
