#!/bin/sh
# Runs in the guest: makes a database on the data volume and loads the TPC-H tables into it.
set -eu
progress() { echo "$1" >"$PERIGEE_PROGRESS"; }
as_postgres() { runuser -u postgres -- "$@"; }
bin=/usr/lib/postgresql/15/bin
inputs=$PWD/inputs

progress "0/7 initdb"
install -d -o postgres -g postgres -m 700 /data/pg
as_postgres $bin/initdb -D /data/pg -A trust -E UTF8 --no-locale --no-sync >/dev/null
cat "$inputs/postgresql.conf" >>/data/pg/postgresql.conf

progress "1/7 start"
# The settings of the load only: nothing needs to survive a crash before the last checkpoint.
as_postgres $bin/pg_ctl -D /data/pg -s -w -t 120 -l /tmp/postgres.log \
    -o "-c fsync=off -c full_page_writes=off -c shared_buffers=64MB -c maintenance_work_mem=96MB" start
psql="as_postgres psql -X -q -v ON_ERROR_STOP=1"

# Rows of a table made in the same transaction are not logged, and frozen from the start.
n=2
for table in part orders lineitem; do
    progress "$n/7 copy $table"
    {
        echo "begin;"
        cat "$inputs/$table.sql"
        echo "copy $table from '$inputs/$table.tbl' with (delimiter '|', freeze); commit;"
    } | $psql
    rm "$inputs/$table.tbl"
    n=$((n + 1))
done
progress "5/7 indexes"
$psql <"$inputs/loaded.sql"

progress "6/7 checkpoint"
$psql -c checkpoint
as_postgres $bin/pg_ctl -D /data/pg -s -w -t 120 -m fast stop
sync
progress "7/7 loaded"
