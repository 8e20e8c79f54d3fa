#!/bin/bash
# Wants a CPU for a share of the time: the time by the clock, so what the guest does not get of it is lost. Now and then the guest
# writes a file, and reads all files again from its disk: from its first volume if it has one. Its console says how far it is.
busy_us=BUSY_US idle_us=IDLE_US

say() {
    echo "busy: $*" >/dev/console
}

# The shell itself waits: a process for each wait would cost more than the wait.
mkfifo /run/nothing
exec 3<>/run/nothing
wait_us() {
    local seconds
    printf -v seconds '%d.%06d' $(($1 / 1000000)) $(($1 % 1000000))
    read -r -t "$seconds" -u 3
}

checked() {
    dd if=/dev/urandom of="$1" bs=16k count=8 2>/dev/null && sha256sum "$1" >"$1.sum" && sync "$1" "$1.sum" &&
        echo 1 >/proc/sys/vm/drop_caches && sha256sum --status -c "$where"/*.sum
}

where=/root
volume=$(grep -lx data0 /sys/block/*/serial | cut -d/ -f4)
if [ -n "$volume" ]; then
    where=/data
    mkfs.ext4 -qF "/dev/$volume" && mount "/dev/$volume" "$where" || say "broken: $volume has no filesystem"
fi
say begun
round=0
while :; do
    round=$((round + 1))
    checked $where/file$((round % 8)) || say "broken in round $round"
    say "round $round"
    for ((turn = 0; turn < 10; turn++)); do
        end=$((${EPOCHREALTIME/[.,]/} + busy_us))
        while ((${EPOCHREALTIME/[.,]/} < end)); do :; done
        # Of different lengths, so that guests that are busy at the same time do not stay so.
        ((idle_us == 0)) || wait_us $((idle_us * (50 + RANDOM % 101) / 100))
    done
done
