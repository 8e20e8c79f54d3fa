//! Providers that say what is not so: no host of another rental or of the cluster's own ends for that.

use std::net::IpAddr;

use super::*;

/// One with a host that has joined, and another one whose first request has this end.
async fn two(does: Does) -> (Rented, FakeHost) {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    rented.double.inside().does = [does].into();
    rented.rent("rent-2").await;
    rented.wait("rent-2", "a request", |rental| rental.asks == 1).await;
    (rented, host)
}

/// The second one ends, and the first one has its host as before.
async fn only_the_second_ends(rented: &Rented, host: &FakeHost) {
    rented.end("rent-2", false).await;
    rented.wait_for_state("rent-2", RentalState::Gone).await;
    rented.has_looked().await;
    let first = rented.get("rent-1");
    assert_eq!((first.state, first.instance.as_deref()), (RentalState::Joined, Some("i-1")));
    assert!(rented.double.alive().iter().any(|one| one.id == "i-1"), "it is not ended");
    assert_eq!(rented.cluster.hosts.state(&host.id), HostState::Up);
}

#[tokio::test]
async fn an_answer_with_the_instance_of_another_rental_is_taken_for_none() {
    let (rented, host) = two(Does::GivesAnothers).await;
    let says = |rental: &Rental| rental.why.contains("which another rental has");
    let asked = rented.wait("rent-2", "what is wrong", says).await;
    assert_eq!((asked.state, asked.instance), (RentalState::Asked, None));
    only_the_second_ends(&rented, &host).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn a_tag_that_names_another_rental_ends_no_host_of_the_first_one() {
    let (rented, host) = two(Does::LosesRequest).await;
    rented.double.change("i-1", |instance| instance.rental = Some("rent-2".to_owned()));
    rented.has_looked().await;
    assert_eq!(rented.get("rent-2").instance, None);
    only_the_second_ends(&rented, &host).await;
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn an_instance_of_another_kind_than_was_rented_is_given_back() {
    let rented = Rented::up(TIMING).await;
    rented.double.inside().makes_kind = Some("m9".to_owned());
    for (name, does) in [("rent-1", Does::Makes), ("rent-2", Does::LosesAnswer)] {
        rented.double.inside().does = [does].into();
        rented.rent(name).await;
        let gone = rented.wait_for_state(name, RentalState::Gone).await;
        let why = gone.ends_because.clone().unwrap_or_default();
        assert!(why.contains("a m9 (on demand), and a m1 (on demand) was rented"), "{gone:?}");
        assert_eq!(rented.double.alive(), []);
    }
    // Where the provider does not say it, nothing is known to be wrong.
    rented.double.inside().makes_kind = Some("unknown".to_owned());
    rented.rent("rent-3").await;
    rented.wait_for_state("rent-3", RentalState::Starting).await;
    rented.has_looked().await;
    assert_eq!(rented.get("rent-3").state, RentalState::Starting);
    rented.supervisor.stop().await;
}

#[tokio::test]
async fn an_instance_that_was_gone_and_runs_again_is_ended_again() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    rented.end("rent-1", false).await;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    rented.double.change("i-1", |instance| instance.state = InstanceState::Running);
    wait_for("it to end again", async || rented.double.alive().is_empty().then_some(())).await;
    let gone = rented.wait_for_state("rent-1", RentalState::Gone).await;
    let ends = states(&gone).into_iter().filter(|state| *state == RentalState::Ending);
    assert_eq!(ends.count(), 2, "{gone:?}");
    assert_eq!(rented.cluster.rentals.all().len(), 1, "it is the same rental");
    rented.supervisor.stop().await;
}

/// A state that goes back before the end changes nothing: what runs and what starts both cost money.
#[tokio::test]
async fn an_instance_whose_state_goes_back_is_the_same_one() {
    let rented = Rented::up(TIMING).await;
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let host = rented.join("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Joined).await;
    for state in [InstanceState::Pending, InstanceState::Unknown, InstanceState::Ending] {
        rented.double.change("i-1", |instance| instance.state = state);
        rented.has_looked().await;
        assert_eq!(rented.get("rent-1").state, RentalState::Joined, "{state:?}");
        rented.cluster.hosts.get(&host.id).expect("its host stays");
    }
    assert_eq!(rented.double.made(), 1);
    rented.supervisor.stop().await;
}

/// The provider says that the instance has the address of a host of the cluster.
#[tokio::test]
async fn an_instance_with_the_address_of_another_host_joins_under_no_address_and_harms_no_host() {
    let (dir, double) = (tempfile::tempdir().expect("a directory"), Double::default());
    double.inside().address = Some("10.9.0.7".to_owned());
    let supervisor = start_with(dir.path(), &double, TIMING, Traffic::Tls(Vec::new())).await;
    let cluster = Arc::clone(&supervisor.cluster);
    let rented = Rented { dir, double, supervisor, cluster };
    let key = NewKey::generate().expect("a key");
    let joins = async |token: &JoinToken, address: &str| {
        let address: IpAddr = address.parse().expect("an address");
        let (host, secret) = (token.host.clone(), token.secret.clone());
        let public_key = key.public().to_hex();
        let ask = Enrol { host, secret, public_key, addresses: vec![address] };
        enrol::enrol(&rented.cluster, ask).await.map(drop)
    };
    let own = HostId::new("home1").expect("a name");
    let url = Some("https://127.0.0.1:7000".to_owned());
    let token = enrol::token(&rented.cluster, own.clone(), url).await.expect("a token");
    joins(&token, "10.9.0.7").await.expect("home1 joins");
    rented.rent("rent-1").await;
    rented.wait_for_state("rent-1", RentalState::Starting).await;
    let user_data = rented.double.inside().asked[0].user_data.clone();
    let token = user_data.split('\'').find_map(|word| word.parse::<JoinToken>().ok());
    let token = token.expect("a token in the user-data");
    let taken = joins(&token, "10.9.0.7").await.expect_err("home1 has the address");
    assert!(taken.kind == ProblemKind::Conflict && taken.why.contains("home1"), "{taken}");
    let other = joins(&token, "10.9.0.8").await.expect_err("the token is for the address");
    assert_eq!(other.kind, ProblemKind::Forbidden, "{other}");
    rented.end("rent-1", false).await;
    rented.wait_for_state("rent-1", RentalState::Gone).await;
    enrol::renew(&rented.cluster, &own, &key.public().to_hex()).await.expect("home1 is as before");
    rented.supervisor.stop().await;
}
