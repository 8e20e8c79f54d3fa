# One job of the soak, on a volume that many such jobs use one after the other.
# It checks what earlier jobs left, writes files with checksums, drops its caches and checks them.
# The answer: how many jobs have run on this volume, and a checksum that the soak knows.
set -eu
cd /data
mkdir -p runs
for sums in runs/*.sums; do
  [ ! -e "$sums" ] || sha256sum --quiet -c "$sums"
done
# This fails when the command runs a second time.
mkdir "runs/$JOB.ran"
round=0
while [ "$round" -lt "$ROUNDS" ]; do
  round=$((round + 1))
  file="runs/$JOB.$((round % 20))"
  dd if=/dev/urandom of="$file" bs=64k count=8 2>/dev/null
  sync "$file"
  echo "$round/$ROUNDS rounds" > "$PERIGEE_PROGRESS"
  sleep 0.2
done
sha256sum runs/"$JOB".[0-9]* > "runs/$JOB.sums"
sync
echo 3 > /proc/sys/vm/drop_caches
for sums in runs/*.sums; do sha256sum --quiet -c "$sums"; done
# The files of the last eight jobs stay.
for old in $(ls -t runs/*.sums | tail -n +9); do
  rm -f "$old" "${old%.sums}".[0-9]*
done
sync
echo "$(ls -d runs/*.ran | wc -l) $(seq "$NUMBER" | sha256sum | cut -d' ' -f1)" | tee /output/answer
