//! A provider that is a real program beside the controller.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::*;

/// Keeps a file for each instance. Its first `create` makes the instance and answers nothing.
const PROGRAM: &str = r#"#!/bin/sh
set -eu
dir=$1
field() { sed -n 's/.*"'"$1"'":"\([^"]*\)".*/\1/p'; }
instance() {
    printf '{"id":"i-%s","rental":"%s","state":"%s","kind":"small","zone":"here","spot":false,"address":null,"started_unix_s":null}' \
        "$1" "$1" "$(cat "$dir/made/$1")"
}
case $2 in
offers)
    echo '{"offers":[{"kind":"small","zone":"here","spot":false,"cpus":1,"memory_bytes":1073741824,"kvm":null,"price":{
        "per_hour_micros":50000,"minimum_s":60,"egress_per_gib_micros":0,"disk_per_gib_month_micros":80000,"source":"test","as_of_unix_s":'"$(date +%s)"'}}]}'
    ;;
create)
    rental=$(field rental)
    echo running >"$dir/made/$rental"
    echo x >>"$dir/creates"
    [ "$(wc -l <"$dir/creates")" -gt 1 ] || exit 1
    printf '{"instance":%s}\n' "$(instance "$rental")"
    ;;
list)
    sep= cluster=$(field cluster)
    printf '{"instances":['
    for made in "$dir"/made/*; do
        [ -e "$made" ] || continue
        printf '%s{"cluster":"%s",%s' "$sep" "$cluster" "$(instance "$(basename "$made")" | cut -c 2-)"
        sep=,
    done
    echo ']}'
    ;;
end)
    id=$(field instance)
    echo gone >"$dir/made/${id#i-}"
    echo '{}'
    ;;
notices) echo '{"notices":[]}' ;;
esac
"#;

fn providers(dir: &Path) -> Renting {
    let program = dir.join("provider");
    std::fs::create_dir(dir.join("made")).expect("a directory");
    std::fs::write(&program, PROGRAM).expect("a program");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("its mode");
    let file = format!("lab:\n  program: [{}, {}]\n", program.display(), dir.display());
    let providers = perigee_cloud::providers(&file).expect("a file of providers");
    Renting { providers, budget: crate::Live::new(Some(BUDGET)) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_loses_its_first_answer_rents_one_host_and_gives_it_back() {
    let (dir, state) = (tempfile::tempdir().expect("one"), tempfile::tempdir().expect("another"));
    let own_url = Some("https://127.0.0.1:7000".to_owned());
    let settings = Settings { own_url, renting: providers(dir.path()), ..Settings::default() };
    let slow = RentalTiming { answer: PATIENCE, ..TIMING.rentals };
    let timing = Timing { rentals: slow, ..TIMING };
    let started = Supervisor::start_with(state.path(), timing, Traffic::Plain, settings, None);
    let supervisor = started.await.expect("the controller starts");
    let cluster = Arc::clone(&supervisor.cluster);
    let double = Double::default();
    let rented = Rented { dir: state, double, supervisor, cluster };
    let offers = rentals::offers(&rented.cluster).await;
    assert_eq!(offers[0].problem, "", "{offers:?}");
    let small = RentHost { kind: "small".to_owned(), ..ask("rent-1") };
    rentals::rent(&rented.cluster, small, "ann".to_owned()).await.expect("a rental");
    let starting = rented.wait_for_state("rent-1", RentalState::Starting).await;
    assert_eq!((starting.instance.as_deref(), starting.asks), (Some("i-rent-1"), 1));
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    rented.end("rent-1", false).await;
    rented.wait_for_state("rent-1", RentalState::Ending).await;
    host.inside().down = true;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    let made = std::fs::read_to_string(dir.path().join("made/rent-1")).expect("its file");
    assert_eq!(made, "gone\n");
    rented.supervisor.stop().await;
}
