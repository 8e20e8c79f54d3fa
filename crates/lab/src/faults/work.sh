# The guest's work: it writes files with checksums to the data volume and the root disk, and reads each again past all
# caches. Files that an earlier job has left on the volume must be right too, whenever its VM ended.
set -eu
at_data=/data/faults
at_root=/var/faults
mkdir -p "$at_data" "$at_root"
sum_of() { dd if="$1" bs=64k iflag=direct 2>/dev/null | sha256sum; }
check() {
  for sum in "$at_data"/*.sum "$at_root"/*.sum; do
    [ -e "$sum" ] || continue
    if [ "$(cat "$sum")" != "$(sum_of "${sum%.sum}.data")" ]; then
      echo "the content of ${sum%.sum}.data is wrong"
      exit 1
    fi
  done
}
check
round=0
while true; do
  round=$((round + 1))
  for at in "$at_data" "$at_root"; do
    file="$at/$((round % 3))"
    dd if=/dev/urandom of="$file.new" bs=64k count=4 2>/dev/null
    sum=$(sha256sum < "$file.new")
    rm -f "$file.sum"
    sync
    mv "$file.new" "$file.data"
    echo "$sum" > "$file.part"
    sync
    mv "$file.part" "$file.sum"
    sync
  done
  check
  echo "$round/1000000 rounds" > "$PERIGEE_PROGRESS"
done
