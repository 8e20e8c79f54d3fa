//! Where an upgrade of the cluster stands, and its end ([`perigee_model::upgrade`]).
//!
//! Each daemon is asked now: what it said a minute ago may be of the program that ran before.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use perigee_model::upgrade::{
    DaemonVersion, FORMAT_LEVEL, FinishUpgrade, HostDaemon, HostUpgrade, Upgrade,
};
use perigee_model::vm::HostReport;
use perigee_model::volume::PoolInfo;
use perigee_model::{HostId, Problem};

use crate::cluster::Cluster;
use crate::level;
use crate::records::HostRecord;

/// `GET /upgrade`.
///
/// # Errors
/// If the store does not answer.
pub async fn status(cluster: &Cluster) -> Result<Upgrade, Problem> {
    look(cluster, FORMAT_LEVEL, &[]).await
}

/// `POST /upgrade/finish`: raises the format level to that of this version.
///
/// # Errors
/// `NotFound` for a host to be left out that is not known, `Conflict` while a daemon is older, silent or not known.
pub async fn finish(cluster: &Cluster, ask: FinishUpgrade) -> Result<Upgrade, Problem> {
    raise_to(cluster, ask, FORMAT_LEVEL).await
}

/// As [`finish`], to this level.
pub(crate) async fn raise_to(
    cluster: &Cluster,
    ask: FinishUpgrade,
    level: u32,
) -> Result<Upgrade, Problem> {
    let before = look(cluster, level, &ask.without).await?;
    if let Some(stranger) =
        ask.without.iter().find(|id| !before.hosts.iter().any(|h| h.host == **id))
    {
        return Err(Problem::not_found(format!("host {stranger}"), "no host has this name")
            .next("`perigee host list` shows the hosts"));
    }
    if !before.blocks.is_empty() {
        return Err(Problem::conflict("can't end the upgrade", before.blocks.join("; ")).next(
            "upgrade these hosts, or start what is off there; a host that is given up: perigee upgrade finish --without HOST",
        ));
    }
    if before.held_back_level.is_some() {
        level::raise(&cluster.records, level).await?;
        tracing::warn!("the upgrade is ended: the format level is {level} from now on");
    }
    Ok(Upgrade { format_level: level.max(before.format_level), held_back_level: None, ..before })
}

/// How the cluster would get to this level, without these hosts.
async fn look(cluster: &Cluster, level: u32, without: &[HostId]) -> Result<Upgrade, Problem> {
    let format_level = level::in_force(&cluster.records).await?;
    let controller = DaemonVersion::own();
    let records = cluster.records.list_each::<HostRecord>("hosts/").await?;
    let asked = records.into_iter().map(async |(key, record)| {
        let id = HostId::new(key.trim_start_matches("hosts/"))
            .map_err(|e| Problem::internal("can't read the hosts", e))?;
        Ok::<_, Problem>(of_host(cluster, &controller, id, record?).await)
    });
    let hosts: Result<Vec<HostUpgrade>, Problem> = join_all(asked).await.into_iter().collect();
    let hosts = hosts?;
    let without: BTreeSet<&HostId> = without.iter().collect();
    let counted = hosts.iter().filter(|host| !without.contains(&host.host));
    let blocks = counted.flat_map(|host| host.blocks(level)).collect();
    let held_back_level = (format_level < level).then_some(level);
    Ok(Upgrade { controller, format_level, held_back_level, hosts, blocks })
}

/// Asks both daemons of a host for their versions. Of one that does not answer, the record has what it last said.
async fn of_host(
    cluster: &Cluster,
    controller: &DaemonVersion,
    host: HostId,
    record: HostRecord,
) -> HostUpgrade {
    let daemon = |asked: Result<Option<DaemonVersion>, Problem>, last: Option<DaemonVersion>| {
        let (version, silent) = match asked {
            Ok(version) => (version, None),
            Err(problem) => (last, Some(problem.why)),
        };
        let differs = version.as_ref().and_then(|version| version.differs(controller));
        HostDaemon { version, differs, silent }
    };
    let (agent, volume_server) = match cluster.hosts.get(&host) {
        Ok(link) => futures_util::join!(
            async { link.agent.get::<HostReport>("/v1/host").await.map(|said| said.version) },
            async { link.volume.get::<PoolInfo>("/v1/pool").await.map(|said| said.version) },
        ),
        Err(problem) => (Err(problem.clone()), Err(problem)),
    };
    HostUpgrade {
        host,
        agent: daemon(agent, record.versions.agent),
        volume_server: daemon(volume_server, record.versions.volume_server),
    }
}
