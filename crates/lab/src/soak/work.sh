# One job of the soak, on a volume that many such jobs use one after the other.
# It checks what earlier jobs left, writes files with checksums, drops its caches and checks them.
# The answer: how many runs have ended on this volume, how often this job's command has run, and a checksum that
# the soak knows. What it writes is right also if the host's power fails at any moment.
set -eu
cd /data
mkdir -p runs
for sums in runs/*.sums; do
  [ ! -e "$sums" ] || sha256sum --quiet -c "$sums"
done
rm -f "runs/$JOB.sums"
echo "$JOB" >> runs/begun
sync
round=0
while [ "$round" -lt "$ROUNDS" ]; do
  round=$((round + 1))
  file="runs/$JOB.$((round % 20))"
  dd if=/dev/urandom of="$file" bs=64k count=8 2>/dev/null
  sync "$file"
  echo "$round/$ROUNDS rounds" > "$PERIGEE_PROGRESS"
  sleep 0.2
done
sha256sum runs/"$JOB".[0-9]* > "runs/$JOB.new"
sync
mv "runs/$JOB.new" "runs/$JOB.sums"
sync
echo 3 > /proc/sys/vm/drop_caches
for sums in runs/*.sums; do sha256sum --quiet -c "$sums"; done
# The files of the last eight jobs stay.
for old in $(ls -t runs/*.sums | tail -n +9); do
  rm -f "$old" "${old%.sums}".[0-9]*
done
echo "$JOB" >> runs/ended
sync
echo "$(wc -l < runs/ended) $(grep -cx "$JOB" runs/begun) $(seq "$NUMBER" | sha256sum | cut -d' ' -f1)" |
  tee /output/answer
