//! For how long a VM does not move by itself after its migrations were aborted.

use perigee_model::HostId;
use perigee_model::job::{Migration, MigrationState};
use perigee_model::plan::Way;
use perigee_planner::RefusedWay;

use super::CANCELLED;

/// The pause after one aborted migration. Each further one doubles it until one completes.
const PAUSE_FIRST_MS: u64 = 30_000;

const PAUSE_MAX_MS: u64 = 60 * 60 * 1000;

/// The hosts to which a VM does not move now. `moves` are its migrations, the first one first; `age_ms` says how long ago one has ended.
///
/// Each aborted migration keeps it from its own destination. The cause may be at the source or at a volume's home,
/// and then the next destination fails too; so all of them count for the pause. After a person has cancelled a
/// migration, the VM moves to none of the `hosts`.
pub fn refused_after(
    moves: &[&Migration],
    hosts: &[HostId],
    age_ms: impl Fn(u64) -> u64,
) -> Vec<RefusedWay> {
    let is_aborted = |migration: &&&Migration| migration.state == MigrationState::Aborted;
    let in_a_row = moves.iter().rev().take_while(is_aborted);
    let doublings = u32::try_from(in_a_row.clone().count()).unwrap_or(u32::MAX).saturating_sub(1);
    let pause_ms = PAUSE_FIRST_MS.saturating_mul(2u64.saturating_pow(doublings)).min(PAUSE_MAX_MS);
    let is_recent = |migration: &&&Migration| {
        migration.ended_ms.is_some_and(|ended_ms| age_ms(ended_ms) < pause_ms)
    };
    let of_one = |migration: &&Migration| {
        let is_cancelled = migration.error == CANCELLED;
        let why = format!("its migration to {} was aborted: {}", migration.to, migration.error);
        let kept = hosts.iter().filter(|host| is_cancelled || **host == migration.to);
        kept.map(|host| RefusedWay { way: Way::Migrate, to: host.clone(), why: why.clone() })
            .collect::<Vec<RefusedWay>>()
    };
    in_a_row.filter(is_recent).flat_map(of_one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOME_MS: u64 = 1_700_000_000_000;

    fn hosts() -> Vec<HostId> {
        ["cloud1", "cloud2"].map(|name| HostId::new(name).expect("name")).to_vec()
    }

    fn ended(to: &str, state: MigrationState, error: &str, ended_ms: u64) -> Migration {
        let [id, vm] = ["q-0001-m1", "q-0001"];
        let (id, vm) = (id.parse().expect("a name"), vm.parse().expect("a name"));
        let hosts = ["home1", to].map(|host| HostId::new(host).expect("a name"));
        let (error, ended_ms) = (error.to_owned(), Some(ended_ms));
        let new = Migration::new(id, vm, hosts, "asked".to_owned(), ended_ms.unwrap_or_default());
        Migration { state, error, ended_ms, ..new }
    }

    fn refused_at(moves: &[Migration], now_ms: u64) -> Vec<String> {
        let moves: Vec<&Migration> = moves.iter().collect();
        let refused = refused_after(&moves, &hosts(), |at_ms| now_ms - at_ms);
        refused.into_iter().map(|way| way.to.to_string()).collect()
    }

    /// The source refuses. Each destination is tried as soon as it is allowed.
    #[test]
    fn a_source_that_refuses_does_not_make_the_migrations_ping_pong() {
        let mut moves = Vec::new();
        for second in 0..24 * 3600 {
            let now_ms = SOME_MS + second * 1000;
            let refused = refused_at(&moves, now_ms);
            let open = hosts().into_iter().find(|host| !refused.contains(&host.to_string()));
            if let Some(to) = open {
                moves.push(ended(to.as_str(), MigrationState::Aborted, "this QEMU cannot", now_ms));
            }
        }
        assert_eq!(
            moves[1].started_ms - moves[0].started_ms,
            1000,
            "the other one is tried at once"
        );
        assert!(moves.len() < 2 * (24 + 7), "{} migrations in a day", moves.len());
        assert!(moves.len() > 2 * 20, "none is given up for ever: {}", moves.len());
    }

    #[test]
    fn one_aborted_migration_keeps_the_vm_from_that_host_for_half_a_minute() {
        let moves = [
            ended("cloud2", MigrationState::Aborted, "no", SOME_MS),
            ended("cloud1", MigrationState::Completed, "", SOME_MS),
            ended("cloud1", MigrationState::Aborted, "no", SOME_MS),
        ];
        assert_eq!(refused_at(&moves, SOME_MS + 29_999), ["cloud1"]);
        assert!(refused_at(&moves, SOME_MS + 30_000).is_empty());
    }

    #[test]
    fn after_a_cancel_the_vm_does_not_move_to_another_host_instead() {
        let moves = [ended("cloud1", MigrationState::Aborted, CANCELLED, SOME_MS)];
        assert_eq!(refused_at(&moves, SOME_MS + 1), ["cloud1", "cloud2"]);
        assert!(refused_at(&moves, SOME_MS + 30_000).is_empty());
    }
}
