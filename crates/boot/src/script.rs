//! The iPXE scripts for a machine's firmware.
//!
//! iPXE splits a line at spaces and has no quotes; `||`, `&&`, `;` and `${` have a meaning. The types of
//! names and secrets exclude all of these; free text is escaped.

use std::net::Ipv4Addr;

use perigee_model::Problem;
use perigee_model::client::{Boot, Over, target_name};

/// The addresses that a booting machine needs.
#[derive(Debug, Clone)]
pub struct Places {
    pub address: Ipv4Addr,
    pub http_port: u16,
    pub iscsi_port: u16,
    pub nbd_port: u16,
    pub append: String,
}

impl Places {
    /// The URL of a path of the HTTP server.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}:{}{path}", self.address, self.http_port)
    }

    /// The first script, the same for every machine. It asks for the script of the machine's MAC address.
    pub fn first(&self) -> String {
        let next = self.url("/boot/${netX/mac:hexhyp}");
        format!("#!ipxe\nchain --replace {next} || shell\n")
    }

    /// Connects a machine to its disk and boots from it.
    pub fn boot(&self, boot: &Boot) -> String {
        let Boot { client, volume, over, .. } = boot;
        let hello =
            format!("#!ipxe\necho Perigee: client {client} boots volume {volume}, {over}\n");
        let start = match over {
            Over::Iscsi => self.iscsi(boot),
            Over::Nbd => self.nbd(boot),
        };
        let again = format!("echo Perigee: booting failed; trying again in 5 s\n{}", self.again());
        format!("{hello}{start} || goto failed\n:failed\n{again}")
    }

    fn iscsi(&self, boot: &Boot) -> String {
        let mut lines = format!("set initiator-iqn {}\n", boot.initiator);
        let settings = [
            (&boot.chap, ["username", "password"]),
            (&boot.target_chap, ["reverse-username", "reverse-password"]),
        ];
        for (chap, [user, password]) in settings {
            match chap {
                Some(chap) => {
                    let secret = chap.secret.reveal();
                    lines += &format!("set {user} {}\nset {password} {secret}\n", chap.user);
                }
                None => lines += &format!("clear {user} ||\nclear {password} ||\n"),
            }
        }
        let (address, port) = (self.address, self.iscsi_port);
        lines + &format!("sanboot iscsi:{address}::{port}:0:{}", target_name(boot.volume.as_str()))
    }

    /// The kernel and its initramfs come over HTTP. `nbdroot=` has the format of Debian's nbd-client, and
    /// `ip=` that of an NFS root.
    fn nbd(&self, boot: &Boot) -> String {
        let (kernel, initrd) = (self.url("/kernel"), self.url("/initrd"));
        let root = format!("{},{},{}", self.address, self.nbd_port, boot.volume);
        let ip = "${netX/ip}::${netX/gateway}:${netX/netmask}::${netX/mac:hexhyp}:off";
        format!(
            "initrd --name initrd {initrd} || goto failed\n\
             kernel {kernel} initrd=initrd nbdroot={root} ip={ip} {} || goto failed\n\
             boot",
            self.append
        )
    }

    /// Says why a machine boots nothing, and ends: the firmware then tries its next device.
    pub fn refuse(problem: &Problem) -> String {
        format!("#!ipxe\n{}sleep 10\nexit 1\n", told(problem))
    }

    /// Says why a machine has to wait, and asks again.
    pub fn wait(&self, problem: &Problem) -> String {
        format!("#!ipxe\n{}{}", told(problem), self.again())
    }

    fn again(&self) -> String {
        format!(
            "sleep 5\nchain --replace {} || goto again\n:again\nsleep 5\nexit 1\n",
            self.url("/boot.ipxe")
        )
    }
}

fn told(problem: &Problem) -> String {
    let text = format!("Perigee: {problem}");
    text.lines().map(|line| format!("echo {}\n", harmless(line.trim()))).collect()
}

/// Escapes text so that iPXE prints it unchanged.
fn harmless(text: &str) -> String {
    let plain =
        |c: char| if c.is_ascii_alphanumeric() || " .,:?_@'/()=-".contains(c) { c } else { ' ' };
    text.chars().map(plain).take(300).collect()
}

#[cfg(test)]
mod tests {
    use perigee_model::ProblemKind;
    use perigee_model::client::Chap;

    use super::*;

    fn places() -> Places {
        let append = "console=ttyS0 quiet".to_owned();
        let address = Ipv4Addr::new(10, 0, 0, 1);
        Places { address, http_port: 7003, iscsi_port: 3260, nbd_port: 10809, append }
    }

    fn boot(over: Over, chap: Option<&str>) -> Boot {
        Boot {
            client: "c1".parse().expect("a name"),
            initiator: "iqn.2026-11.org.perigee.client:c1".parse().expect("a name"),
            volume: "c1.debian".parse().expect("a name"),
            over,
            chap: chap.map(|secret| Chap {
                user: "c1".parse().expect("a name"),
                secret: secret.parse().expect("a secret"),
            }),
            target_chap: None,
        }
    }

    #[test]
    fn over_iscsi_the_firmware_logs_in_as_the_client() {
        let script = places().boot(&boot(Over::Iscsi, Some("correct-horse")));
        for line in [
            "set initiator-iqn iqn.2026-11.org.perigee.client:c1",
            "set username c1",
            "set password correct-horse",
            "clear reverse-username ||",
            "sanboot iscsi:10.0.0.1::3260:0:iqn.2026-11.org.perigee:c1.debian || goto failed",
        ] {
            assert!(script.lines().any(|l| l == line), "{line:?} is not in {script}");
        }
        assert!(script.starts_with("#!ipxe\n"));
    }

    #[test]
    fn over_nbd_the_kernel_is_told_where_its_root_is() {
        let script = places().boot(&boot(Over::Nbd, None));
        let kernel = script.lines().find(|l| l.starts_with("kernel ")).expect("a kernel");
        assert!(kernel.contains(" nbdroot=10.0.0.1,10809,c1.debian ip=${netX/ip}::"), "{kernel}");
        assert!(kernel.contains(" console=ttyS0 quiet ||"), "{kernel}");
    }

    #[test]
    fn an_error_s_text_can_t_become_a_command() {
        let problem =
            Problem::new(ProblemKind::NotFound, "boot", "a || b ; ${c} && shell").next("try\nthis");
        let script = Places::refuse(&problem);
        assert!(
            !script.contains("||") && !script.contains('$') && !script.contains(';'),
            "{script}"
        );
        assert!(
            script
                .lines()
                .skip(1)
                .all(|l| l.starts_with("echo ") || l.starts_with("sleep ") || l == "exit 1")
        );
    }
}
