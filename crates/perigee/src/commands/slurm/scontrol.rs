//! Asks and tells Slurm's controller, by `scontrol`, which every machine with slurmctld has.
//!
//! A Slurm that does not answer is an error, never a node that is down.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use perigee_model::Problem;
use tokio::process::Command;

/// `scontrol` itself tries for about 10 s to reach slurmctld.
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// More nodes than a Slurm cluster has: who names them by `[1-999999999]` has made a mistake.
const NODES_MAX: usize = 20_000;

/// What Slurm says of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its state and its flags, as `DOWN` and `CLOUD`.
    pub flags: Vec<String>,
    /// Why, in whoever's words that has set the state; empty if nobody has said it.
    pub reason: String,
}

impl Node {
    /// Whether its state has this word.
    pub fn is(&self, flag: &str) -> bool {
        self.flags.iter().any(|own| own == flag)
    }

    /// As Slurm shows it.
    pub fn state(&self) -> String {
        self.flags.join("+")
    }
}

/// What Slurm's configuration says of nodes that come and go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PowerSaving {
    /// `ClusterName`, whose case says nothing.
    pub cluster: String,
    /// So long a node may take to register.
    pub resume_timeout_s: u64,
    /// Whether Slurm takes a node's address from where the node has registered.
    pub takes_addresses: bool,
}

impl PowerSaving {
    /// Whether the Slurm that answers is the one of this name.
    ///
    /// # Errors
    /// `Conflict` if it is another one: what it says of nodes is not about these.
    pub fn check_cluster(&self, wanted: &str) -> Result<(), Problem> {
        if self.cluster.eq_ignore_ascii_case(wanted) {
            return Ok(());
        }
        let why = format!(
            "the Slurm that answers is {}, and the configuration is for {wanted}",
            self.cluster
        );
        Err(Problem::conflict("can't use what scontrol says", why)
            .next("name its ClusterName in the configuration (cluster: NAME), or set SLURM_CONF"))
    }
}

/// The names in a host list, as `cloud[1-3,7]`, in its order.
///
/// # Errors
/// `Invalid` when it is no list, or a too long one.
pub async fn names(list: &str) -> Result<Vec<String>, Problem> {
    let what = format!("can't read the node list {list:?}");
    // An empty one would be taken from the environment, and one that begins so for an option.
    if list.is_empty() || list.starts_with('-') {
        return Err(Problem::invalid(what, "it is no list of nodes"));
    }
    let said = run(&["show", "hostnames", list]).await?;
    let names: Vec<String> = said.lines().map(str::to_owned).collect();
    match names.len() {
        0 => Err(Problem::invalid(what, "it names no node")),
        1..=NODES_MAX => Ok(names),
        many => Err(Problem::invalid(what, format!("it has {many} nodes, more than {NODES_MAX}"))),
    }
}

/// All nodes that Slurm shows. Without `PrivateData=cloud` it shows none that is powered down.
///
/// # Errors
/// `Unavailable` when Slurm does not say it.
pub async fn nodes() -> Result<BTreeMap<String, Node>, Problem> {
    parse_nodes(&run(&["--all", "--oneliner", "show", "node"]).await?)
}

/// One node; `None` if Slurm shows no such node.
///
/// # Errors
/// `Unavailable` when Slurm does not say it.
pub async fn node(name: &str) -> Result<Option<Node>, Problem> {
    let mut shown = match run(&["--all", "--oneliner", "show", "node", name]).await {
        Ok(said) => parse_nodes(&said)?,
        // So it ends for a node that it does not show, too. Only the list of all of them tells that.
        Err(_) => nodes().await?,
    };
    Ok(shown.remove(name))
}

/// # Errors
/// `Unavailable` when Slurm does not say it.
pub async fn power_saving() -> Result<PowerSaving, Problem> {
    parse_config(&run(&["show", "config"]).await?)
}

/// Changes what is said of a node: `fields` are pairs as `nodeaddr=192.0.2.7`.
///
/// # Errors
/// With Slurm's words.
pub async fn update(node: &str, fields: &[String]) -> Result<(), Problem> {
    let name = format!("nodename={node}");
    let mut words = vec!["update", &name];
    words.extend(fields.iter().map(String::as_str));
    run(&words).await.map(drop)
}

/// What `scontrol` prints.
async fn run(words: &[&str]) -> Result<String, Problem> {
    let what = || format!("can't ask Slurm (scontrol {})", words.join(" "));
    let mut command = Command::new("scontrol");
    command.args(words).stdin(Stdio::null()).kill_on_drop(true);
    let output = match tokio::time::timeout(ANSWER_MAX, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => {
            return Err(Problem::unavailable(what(), error)
                .next("run it where slurmctld runs, with scontrol in PATH"));
        }
        Err(_) => {
            let why = format!("it has not answered within {} s", ANSWER_MAX.as_secs());
            return Err(Problem::unavailable(what(), why));
        }
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said =
            if said.trim().is_empty() { output.status.to_string() } else { said.trim().into() };
        return Err(Problem::unavailable(what(), said));
    }
    String::from_utf8(output.stdout)
        .map_err(|_| Problem::unavailable(what(), "its answer is no text"))
}

/// What is said when all nodes are powered down, and are not shown for that.
const NONE: &str = "No nodes in the system";

fn parse_nodes(text: &str) -> Result<BTreeMap<String, Node>, Problem> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && *line != NONE);
    lines.map(parse_node).collect()
}

/// A line is `NodeName=cloud1 Arch=x86_64 … State=IDLE+CLOUD … Reason=some words [root@2026-11-29T20:43:16]`. Its fields have no
/// quotes, so those before the state that may have spaces end at the first ` State=`.
fn parse_node(line: &str) -> Result<(String, Node), Problem> {
    let bad = || {
        let shown: String = line.chars().take(200).collect();
        Problem::unavailable("can't read what scontrol says of a node", format!("it is {shown:?}"))
    };
    let value = |key: &str| {
        let rest = line.split_once(key).map(|(_, rest)| rest)?;
        rest.split(' ').next().filter(|value| !value.is_empty())
    };
    let name = line.strip_prefix("NodeName=").and_then(|rest| rest.split(' ').next());
    let (Some(name), Some(state)) = (name, value(" State=")) else { return Err(bad()) };
    // A node that does not answer has a star behind its state in some versions, and a flag in others.
    let mut flags: Vec<String> = state.split('+').map(|flag| flag.replace('*', "")).collect();
    if state.contains('*') && !flags.iter().any(|flag| flag == "NOT_RESPONDING") {
        flags.push("NOT_RESPONDING".to_owned());
    }
    let reason = line.split_once(" Reason=").map_or("", |(_, reason)| reason);
    let reason = reason.rsplit_once(" [").map_or(reason, |(words, _)| words);
    Ok((name.to_owned(), Node { flags, reason: reason.to_owned() }))
}

fn parse_config(text: &str) -> Result<PowerSaving, Problem> {
    let value = |key: &str| {
        text.lines().find_map(|line| {
            let (own, value) = line.split_once('=')?;
            (own.trim() == key).then(|| value.trim())
        })
    };
    let seconds = |key: &str| value(key)?.split(' ').next()?.parse().ok();
    let lacks = |key: &str| {
        Problem::unavailable(
            "can't read what scontrol says of Slurm's configuration",
            format!("it has no {key}"),
        )
    };
    let parameters = value("SlurmctldParameters").ok_or_else(|| lacks("SlurmctldParameters"))?;
    Ok(PowerSaving {
        cluster: value("ClusterName").ok_or_else(|| lacks("ClusterName"))?.to_owned(),
        resume_timeout_s: seconds("ResumeTimeout").ok_or_else(|| lacks("ResumeTimeout"))?,
        takes_addresses: parameters
            .split(',')
            .any(|one| one.eq_ignore_ascii_case("cloud_reg_addrs")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Slurm 22.05.8 prints it.
    const LINES: &str = "NodeName=cloud1 CoresPerSocket=1  CPUAlloc=0 OS=Linux 6.1 #1 SMP NodeAddr=cloud1 RealMemory=200 Boards=1 \
State=DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING ThreadsPerCore=1 Partitions=cloud  Reason=ResumeTimeout reached [root@2026-11-29T20:43:16]
NodeName=cloud2 Arch=x86_64 State=IDLE*+CLOUD ThreadsPerCore=1  \n\n";

    #[test]
    fn a_node_has_a_state_flags_and_a_reason() {
        let nodes = parse_nodes(LINES).expect("two nodes");
        let first = &nodes["cloud1"];
        assert!(first.is("DOWN") && first.is("POWERED_DOWN") && !first.is("POWERED"));
        assert_eq!(first.reason, "ResumeTimeout reached");
        assert_eq!(first.state(), "DOWN+CLOUD+POWERED_DOWN+NOT_RESPONDING");
        let second = &nodes["cloud2"];
        assert!(second.is("IDLE") && second.is("NOT_RESPONDING") && second.reason.is_empty());
        assert_eq!(parse_nodes("No nodes in the system\n"), Ok(BTreeMap::new()));
    }

    #[test]
    fn what_is_no_node_is_not_known() {
        let cut = parse_nodes("NodeName=cloud1 CoresPerSocket=1").expect_err("no state");
        assert_eq!(cut.kind, perigee_model::ProblemKind::Unavailable);
        assert!(parse_nodes("slurm_load_node error").is_err());
    }

    #[test]
    fn slurms_configuration_says_who_tells_addresses() {
        let text = |parameters: &str| {
            format!(
                "Configuration data as of 2026-11-29T20:43:16\nClusterName             = alpha\nResumeTimeout           = 300 sec\nSlurmctldParameters     = {parameters}\n"
            )
        };
        let said = parse_config(&text("enable_configless,cloud_reg_addrs")).expect("it is there");
        assert_eq!((said.resume_timeout_s, said.takes_addresses), (300, true));
        assert_eq!(said.check_cluster("Alpha"), Ok(()));
        let other = said.check_cluster("beta").expect_err("another one");
        assert_eq!(other.kind, perigee_model::ProblemKind::Conflict);
        assert!(!parse_config(&text("(null)")).expect("it is there").takes_addresses);
        assert!(parse_config("Slurmctld is DOWN").is_err());
    }
}
