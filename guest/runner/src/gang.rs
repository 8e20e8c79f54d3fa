//! The job has several VMs, and this is one of them: names and keys with which they reach each other, an SSH server, and
//! the wait until all are ready.
//!
//! The server is the runner's own, with its own configuration and port, so it does not matter how the image has set up its own.
//! It belongs to the job's processes and ends with them.

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use perigee_model::guest::GuestGang;

use crate::command;
use crate::error::Error;
use crate::processes::JobCgroup;

/// One line for each member, as Open MPI's hostfile.
pub const HOSTS_FILE: &str = "/job/hosts";

const SERVER: &str = "/usr/sbin/sshd";
const SERVER_DIRECTORY: &str = "/etc/perigee-ssh";
const USER_DIRECTORY: &str = "/root/.ssh";
const PORT: u16 = 2222;
const SERVER_DEADLINE: Duration = Duration::from_secs(120);
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Returns when the other members can log in here. Without `mpi` the command may do without that, so it starts also if they
/// can't.
pub fn set_up(gang: &GuestGang, cgroup: &JobCgroup, say: impl Fn(String)) -> Result<(), Error> {
    let own = gang.members.get(gang.rank as usize);
    let own = own.ok_or_else(|| Error::Seed(format!("there is no member {}", gang.rank)))?;
    fs::write("/proc/sys/kernel/hostname", &own.name).map_err(Error::io("set the host name"))?;
    let hosts = "/etc/hosts";
    let file = OpenOptions::new().append(true).create(true).open(hosts);
    let written = file.and_then(|mut file| file.write_all(names_of(gang).as_bytes()));
    written.map_err(Error::io(format!("write {hosts}")))?;
    fs::write(HOSTS_FILE, hosts_file(gang)).map_err(Error::io(format!("write {HOSTS_FILE}")))?;
    if !Path::new(SERVER).exists() {
        if gang.mpi {
            return Err(Error::NoSshServer);
        }
        return Ok(());
    }
    let at = SocketAddr::from((own.address, PORT));
    let started =
        write_keys(gang).and_then(|()| unlock_root()).and_then(|()| start_server(at, cgroup));
    needed_by(gang, started, say)
}

/// Open MPI starts its processes over SSH. For other commands it is said that the others can't log in.
fn needed_by(
    gang: &GuestGang,
    started: Result<(), Error>,
    say: impl Fn(String),
) -> Result<(), Error> {
    match started {
        Err(error) if !gang.mpi => {
            say(format!("the other VMs of the job can't log in here: {error}"));
            Ok(())
        }
        started => started,
    }
}

/// Lines for `/etc/hosts`. A member is also known by its rank.
fn names_of(gang: &GuestGang) -> String {
    let members = (0..).zip(&gang.members);
    let lines = members
        .map(|(rank, member): (u32, _)| format!("{} {} n{rank}\n", member.address, member.name));
    lines.collect()
}

fn hosts_file(gang: &GuestGang) -> String {
    let lines = gang.members.iter().map(|member| format!("{} slots={}\n", member.name, gang.slots));
    lines.collect()
}

/// The command's environment, beside that of every job.
pub fn environment(gang: &GuestGang) -> Vec<(&'static str, String)> {
    let mut all = vec![
        ("PERIGEE_RANK", gang.rank.to_string()),
        ("PERIGEE_COUNT", gang.members.len().to_string()),
        ("PERIGEE_HOSTS", HOSTS_FILE.to_owned()),
    ];
    // So `mpirun PROGRAM` needs no options: the job is root in a VM of its own, and there is one network.
    all.extend([
        ("OMPI_MCA_orte_default_hostfile", HOSTS_FILE.to_owned()),
        ("OMPI_MCA_btl_tcp_if_include", gang.subnet.clone()),
        ("OMPI_MCA_oob_tcp_if_include", gang.subnet.clone()),
        ("OMPI_ALLOW_RUN_AS_ROOT", "1".to_owned()),
        ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1".to_owned()),
    ]);
    all
}

fn write_keys(gang: &GuestGang) -> Result<(), Error> {
    for directory in [SERVER_DIRECTORY, USER_DIRECTORY, "/run/sshd"] {
        fs::create_dir_all(directory).map_err(Error::io(format!("make {directory}")))?;
        let mode = if directory == "/run/sshd" { 0o755 } else { 0o700 };
        fs::set_permissions(directory, Permissions::from_mode(mode))
            .map_err(Error::io(format!("set the mode of {directory}")))?;
    }
    let server = |name: &str| format!("{SERVER_DIRECTORY}/{name}");
    write_private(&server("host_key"), &gang.host.private)?;
    write_private(&server("authorized_keys"), &format!("{}\n", gang.user.public))?;
    write_private(&server("sshd_config"), &server_configuration(gang))?;
    write_private(&server("id_ed25519"), &gang.user.private)?;
    write_private(&server("known_hosts"), &known_hosts(gang))?;
    let user = format!("{USER_DIRECTORY}/config");
    let before = fs::read_to_string(&user).unwrap_or_default();
    write_private(&user, &format!("{}{before}", client_configuration(gang)))
}

/// All names and addresses of the members.
fn all_names(gang: &GuestGang) -> Vec<String> {
    let members = (0..).zip(&gang.members);
    let names = members.flat_map(|(rank, member): (u32, _)| {
        [member.name.clone(), format!("n{rank}"), member.address.to_string()]
    });
    names.collect()
}

fn known_hosts(gang: &GuestGang) -> String {
    let lines = all_names(gang).into_iter();
    lines.map(|name| format!("[{name}]:{PORT} {}\n", gang.host.public)).collect()
}

fn client_configuration(gang: &GuestGang) -> String {
    let names = all_names(gang).join(" ");
    format!(
        "Host {names}\n  Port {PORT}\n  IdentityFile {SERVER_DIRECTORY}/id_ed25519\n  \
         UserKnownHostsFile {SERVER_DIRECTORY}/known_hosts\n  StrictHostKeyChecking yes\n  BatchMode yes\n"
    )
}

fn server_configuration(gang: &GuestGang) -> String {
    let hosts = format!("PERIGEE_RANK={} PERIGEE_COUNT={}", gang.rank, gang.members.len());
    format!(
        "HostKey {SERVER_DIRECTORY}/host_key\nAuthorizedKeysFile {SERVER_DIRECTORY}/authorized_keys\n\
         PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
         UsePAM no\nUseDNS no\nPidFile none\nMaxStartups 256\nMaxSessions 256\nSubsystem sftp internal-sftp\n\
         SetEnv {hosts} PERIGEE_HOSTS={HOSTS_FILE}\n"
    )
}

fn write_private(path: &str, text: &str) -> Result<(), Error> {
    let open = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let written = open.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(Error::io(format!("write {path}")))
}

/// An account whose password begins with `!` is locked, and `sshd` lets nobody in, with whatever key.
fn unlock_root() -> Result<(), Error> {
    let path = "/etc/shadow";
    let Ok(text) = fs::read_to_string(path) else { return Ok(()) };
    let changed = unlocked(&text);
    if changed == text {
        return Ok(());
    }
    fs::write(path, changed).map_err(Error::io(format!("write {path}")))
}

fn unlocked(shadow: &str) -> String {
    let lines = shadow.split_inclusive('\n').map(|line| match line.strip_prefix("root:!") {
        Some(rest) => format!("root:*{}", &rest[rest.find(':').unwrap_or(rest.len())..]),
        None => line.to_owned(),
    });
    lines.collect()
}

fn start_server(at: SocketAddr, cgroup: &JobCgroup) -> Result<(), Error> {
    let mut server = Command::new("/bin/sh")
        .args(["-c", command::ENTER_CGROUP, command::NAME])
        .arg(cgroup.procs_file())
        .args([SERVER, "-D", "-e", "-f", &format!("{SERVER_DIRECTORY}/sshd_config")])
        .args(["-o", &format!("ListenAddress={at}")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(Error::io("start the SSH server"))?;
    let begun = Instant::now();
    while TcpStream::connect_timeout(&at, Duration::from_secs(5)).is_err() {
        let ended = server.try_wait().map_err(Error::io("look for the SSH server"))?;
        if let Some(status) = ended {
            return Err(Error::SshServer(format!("it ended with {status}")));
        }
        if begun.elapsed() > SERVER_DEADLINE {
            let limit_s = SERVER_DEADLINE.as_secs();
            return Err(Error::SshServer(format!("it does not listen within {limit_s} s")));
        }
        std::thread::sleep(RETRY_DELAY);
    }
    // It ends with the job's processes, and nobody waits for it.
    std::thread::spawn(move || server.wait());
    Ok(())
}

#[cfg(test)]
mod tests {
    use perigee_model::guest::{GuestKey, GuestMember};

    use super::*;

    fn gang() -> GuestGang {
        let key = |name: &str| GuestKey {
            private: format!("private {name}"),
            public: format!("ssh-ed25519 {name}"),
        };
        let member = |rank: u8| GuestMember {
            name: format!("sort-0001-n{rank}"),
            address: [10, 88, 0, 2 + rank].into(),
        };
        GuestGang {
            rank: 1,
            members: vec![member(0), member(1)],
            slots: 2,
            subnet: "10.88.0.0/24".to_owned(),
            mpi: true,
            user: key("user"),
            host: key("host"),
        }
    }

    #[test]
    fn members_are_found_by_name_rank_and_address() {
        let gang = gang();
        assert_eq!(names_of(&gang), "10.88.0.2 sort-0001-n0 n0\n10.88.0.3 sort-0001-n1 n1\n");
        assert_eq!(hosts_file(&gang), "sort-0001-n0 slots=2\nsort-0001-n1 slots=2\n");
        let known = known_hosts(&gang);
        for name in ["sort-0001-n1", "n1", "10.88.0.3"] {
            assert!(known.contains(&format!("[{name}]:2222 ssh-ed25519 host\n")), "{known}");
        }
        assert!(client_configuration(&gang).starts_with("Host sort-0001-n0 n0 10.88.0.2 sort-"));
    }

    #[test]
    fn an_ssh_server_that_does_not_start_ends_only_a_job_that_needs_it() {
        let failed = || Err(Error::SshServer("it ended with 255".to_owned()));
        let said = std::cell::RefCell::new(Vec::new());
        let say = |line| said.borrow_mut().push(line);
        assert!(needed_by(&gang(), failed(), say).is_err());
        let without_mpi = GuestGang { mpi: false, ..gang() };
        assert!(needed_by(&without_mpi, Ok(()), say).is_ok() && said.borrow().is_empty());
        assert!(needed_by(&without_mpi, failed(), say).is_ok());
        assert!(said.borrow()[0].contains("it ended with 255"), "{said:?}");
    }

    #[test]
    fn only_a_locked_root_is_unlocked() {
        let locked = "root:!$y$abc:19000:0:99999:7:::\ndaemon:!:19000::::::\n";
        assert_eq!(unlocked(locked), "root:*:19000:0:99999:7:::\ndaemon:!:19000::::::\n");
        let open = "root:*:19000:0:99999:7:::\n";
        assert_eq!(unlocked(open), open);
    }

    #[test]
    fn the_command_knows_its_rank_and_mpirun_its_hosts() {
        let all = environment(&gang());
        let of = |name: &str| all.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str());
        assert_eq!((of("PERIGEE_RANK"), of("PERIGEE_COUNT")), (Some("1"), Some("2")));
        assert_eq!(of("OMPI_MCA_orte_default_hostfile"), Some(HOSTS_FILE));
    }
}
