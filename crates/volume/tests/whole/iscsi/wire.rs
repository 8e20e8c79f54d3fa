//! An initiator that says what a test wants it to say, right or wrong.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::server::Server;

/// A target answers, or hangs up, long before that.
const DEADLINE: Duration = Duration::from_secs(120);
pub const NO_TAG: u32 = u32::MAX;

pub struct Initiator {
    stream: TcpStream,
    pub cmd_sn: u32,
    /// Without one, each connection is a session of its own.
    pub isid: Option<[u8; 6]>,
    /// Digests of headers and data.
    digests: bool,
}

/// A PDU as it came.
#[derive(Debug, Clone)]
pub struct Pdu {
    pub head: [u8; 48],
    pub data: Vec<u8>,
}

/// How a command has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub status: u8,
    /// Of the sense data.
    pub key: u8,
    /// Additional sense code and its qualifier.
    pub code: u16,
    pub data: Vec<u8>,
}

impl Pdu {
    pub fn opcode(&self) -> u8 {
        self.head[0] & 0x3f
    }
}

pub fn keys(keys: &[&str]) -> Vec<u8> {
    keys.iter().flat_map(|key| key.bytes().chain([0])).collect()
}

/// A header: opcode, flags, and 32-bit fields by their place.
pub fn head(opcode: u8, flags: u8, fields: &[(usize, u32)]) -> [u8; 48] {
    let mut head = [0; 48];
    (head[0], head[1]) = (opcode, flags);
    for (at, value) in fields {
        head[*at..*at + 4].copy_from_slice(&value.to_be_bytes());
    }
    head
}

impl Initiator {
    pub fn connect(server: &Server) -> Self {
        let stream = TcpStream::connect(&server.iscsi_addr).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a deadline");
        stream.set_write_timeout(Some(DEADLINE)).expect("a deadline");
        Self { stream, cmd_sn: 1, isid: None, digests: false }
    }

    /// One login PDU from the stage of operation to the full feature phase. The status.
    pub fn log_in(&mut self, name: &str, volume: &str, more: &[&str]) -> u16 {
        let who = [
            format!("InitiatorName={name}"),
            format!("TargetName=iqn.2026-11.org.perigee:{volume}"),
        ];
        let all: Vec<&str> = who.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let mut login = head(0x43, 0x87, &[(24, self.cmd_sn)]);
        let port = self.stream.local_addr().expect("an address").port().to_be_bytes();
        let isid = self.isid.unwrap_or([0x80, 0, 0, 0, port[0], port[1]]);
        login[8..14].copy_from_slice(&isid);
        self.send(login, &keys(&all));
        let answer = self.receive().expect("an answer to the login");
        assert_eq!(answer.opcode(), 0x23);
        self.digests = more.iter().any(|key| key.contains("Digest=CRC32C"));
        u16::from_be_bytes([answer.head[36], answer.head[37]])
    }

    pub fn session(server: &Server, name: &str, volume: &str) -> Self {
        let mut initiator = Self::connect(server);
        assert_eq!(initiator.log_in(name, volume, &[]), 0, "the login");
        initiator
    }

    /// With the lengths that it really has, and right digests.
    pub fn send(&mut self, mut head: [u8; 48], data: &[u8]) {
        let length = u32::try_from(data.len()).expect("short").to_be_bytes();
        head[5..8].copy_from_slice(&length[1..]);
        let mut bytes = head.to_vec();
        if self.digests {
            bytes.extend(crc32c::crc32c(&head).to_le_bytes());
        }
        let mut data = data.to_vec();
        data.resize(data.len().next_multiple_of(4), 0);
        bytes.extend(&data);
        if self.digests && !data.is_empty() {
            bytes.extend(crc32c::crc32c(&data).to_le_bytes());
        }
        self.raw(&bytes);
    }

    /// A target that has hung up takes nothing more.
    pub fn raw(&mut self, bytes: &[u8]) {
        match self.stream.write_all(bytes) {
            Ok(()) => {}
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
                "{error}"
            ),
        }
    }

    /// Sends as much as the target takes within a moment.
    pub fn pour(&mut self, bytes: &[u8]) -> bool {
        let moment = Some(Duration::from_millis(500));
        self.stream.set_write_timeout(moment).expect("a deadline");
        self.stream.write_all(bytes).is_ok()
    }

    /// `None`: the target has hung up.
    pub fn receive(&mut self) -> Option<Pdu> {
        let mut head = [0; 48];
        self.take(&mut head)?;
        let mut digest = [0; 4];
        if self.digests {
            self.take(&mut digest)?;
            assert_eq!(digest, crc32c::crc32c(&head).to_le_bytes());
        }
        let length = u32::from_be_bytes([0, head[5], head[6], head[7]]) as usize;
        let mut data = vec![0; length.next_multiple_of(4)];
        self.take(&mut data)?;
        if self.digests && length > 0 {
            self.take(&mut digest)?;
            assert_eq!(digest, crc32c::crc32c(&data).to_le_bytes());
        }
        data.truncate(length);
        Some(Pdu { head, data })
    }

    fn take(&mut self, bytes: &mut [u8]) -> Option<()> {
        match self.stream.read_exact(bytes) {
            Ok(()) => Some(()),
            Err(error) => {
                let gone = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset];
                assert!(gone.contains(&error.kind()), "waited {DEADLINE:?}: {error}");
                None
            }
        }
    }

    pub fn is_hung_up_on(&mut self) -> bool {
        while let Some(pdu) = self.receive() {
            if pdu.opcode() != 0x3f {
                return false;
            }
        }
        true
    }

    /// A command's header; it has the next number.
    pub fn command(&mut self, flags: u8, tag: u32, expected: u32, cdb: &[u8]) -> [u8; 48] {
        let mut command = head(0x01, flags, &[(16, tag), (20, expected), (24, self.cmd_sn)]);
        command[32..32 + cdb.len()].copy_from_slice(cdb);
        self.cmd_sn += 1;
        command
    }

    /// Runs a command to its end: status, and the key of the sense data.
    pub fn run(&mut self, flags: u8, expected: u32, cdb: &[u8], data: &[u8]) -> (u8, u8) {
        let Outcome { status, key, .. } = self.execute(flags, expected, cdb, data);
        (status, key)
    }

    /// As [`Self::run`], with all that came back.
    pub fn execute(&mut self, flags: u8, expected: u32, cdb: &[u8], data: &[u8]) -> Outcome {
        let command = self.command(flags, 7, expected, cdb);
        self.send(command, data);
        let mut data = Vec::new();
        loop {
            let pdu = self.receive().expect("an answer");
            let status = pdu.head[3];
            // After two bytes of length, sense data in the fixed format.
            let sense = |at: usize| pdu.data.get(2 + at).copied().unwrap_or(0);
            let (key, code) = (sense(2) & 0x0f, u16::from_be_bytes([sense(12), sense(13)]));
            match pdu.opcode() {
                0x21 => return Outcome { status, key, code, data },
                0x25 => {
                    data.extend(&pdu.data);
                    if pdu.head[1] & 1 != 0 {
                        return Outcome { status, key: 0, code: 0, data };
                    }
                }
                _ => {}
            }
        }
    }

    /// The first command is told that the unit is new to the session.
    pub fn greet(&mut self) {
        assert_eq!(self.run(0x80, 0, &[0; 6], &[]), (2, 6), "a unit attention");
        assert_eq!(self.run(0x80, 0, &[0; 6], &[]), (0, 0), "the unit is ready");
    }
}
