//! One session that keeps a queue of requests full. The answers of one read from the socket are followed by one
//! write with as many new requests.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::wire::{HEAD_BYTES, Head, Kind, NO_TAG, Parser, SECTOR_BYTES, opcode, wrong};

/// A target that sends nothing for this long has failed.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// The longest PDU that is accepted. A read from the socket takes up to twice as much.
const SEGMENT_BYTES: usize = 256 << 10;
/// The default for a target that does not send a value (RFC 7143, 13.12 and 13.14).
const THEIR_SEGMENT_BYTES: usize = 8192;
const FIRST_BURST_BYTES: usize = 65536;

/// Chooses the position of the next request, in units of its length.
pub struct Order {
    /// The state of xorshift64*; `None` for sequential requests.
    random: Option<u64>,
    next: u64,
}

impl Order {
    pub fn random(seed: u64) -> Self {
        Self { random: Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1), next: 0 }
    }

    pub fn sequential() -> Self {
        Self { random: None, next: 0 }
    }

    fn below(&mut self, units: u64) -> u64 {
        let Some(state) = &mut self.random else {
            self.next = (self.next + 1) % units;
            return self.next;
        };
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        let high =
            (u128::from(state.wrapping_mul(0x2545_f491_4f6c_dd1d)) * u128::from(units)) >> 64;
        u64::try_from(high).expect("less than the bound")
    }
}

/// The result of the login's negotiation.
#[derive(Debug, Clone, Copy)]
struct Agreed {
    segment_bytes: usize,
    /// The most data that a write sends with its command.
    immediate_bytes: usize,
}

pub struct Session {
    stream: TcpStream,
    lun: u8,
    agreed: Agreed,
    command_number: u32,
    commands_max: u32,
    status_number: u32,
    parser: Parser,
    input: Vec<u8>,
    output: Vec<u8>,
    payload: Vec<u8>,
    work: Work,
    answered: u64,
    in_flight: u32,
    ending: bool,
}

struct Work {
    kind: Kind,
    length_bytes: u32,
    units: u64,
    order: Order,
}

impl Session {
    /// Logs in without authentication and without digests.
    pub fn open(portal: SocketAddr, target: &str, lun: u8) -> io::Result<Self> {
        let mut stream = TcpStream::connect(portal)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE_MAX))?;
        stream.set_write_timeout(Some(SILENCE_MAX))?;
        let (agreed, status_number) = log_in(&mut stream, target)?;
        let work = Work { kind: Kind::Ask, length_bytes: 0, units: 1, order: Order::sequential() };
        let mut session = Self {
            stream,
            lun,
            agreed,
            command_number: 1,
            commands_max: 0,
            status_number,
            parser: Parser::default(),
            input: vec![0; 2 * SEGMENT_BYTES],
            output: Vec::new(),
            payload: Vec::new(),
            work,
            answered: 0,
            in_flight: 0,
            ending: false,
        };
        session.greet()?;
        Ok(session)
    }

    pub fn answered(&self) -> u64 {
        self.answered
    }

    /// The first commands may be answered with events of the unit since it was created (unit attentions).
    fn greet(&mut self) -> io::Result<()> {
        let mut refused = None;
        for _ in 0..3 {
            self.request(0);
            match self.turn() {
                Ok(()) => return Ok(()),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.expect("three answers"))
    }

    /// Fills the queue.
    pub fn begin(
        &mut self,
        kind: Kind,
        length_bytes: u32,
        depth: u32,
        order: Order,
    ) -> io::Result<()> {
        let granted = self.commands_max.wrapping_sub(self.command_number).wrapping_add(1);
        if depth > granted {
            return Err(wrong(format!("the target takes {granted} commands at once")));
        }
        let size_bytes = self.capacity_bytes()?;
        let units = size_bytes / u64::from(length_bytes);
        self.work = Work { kind, length_bytes, units, order };
        self.payload = (1..=u8::MAX).cycle().take(length_bytes as usize).collect();
        self.answered = 0;
        for tag in 0..depth {
            self.request(tag);
        }
        self.send()
    }

    /// Waits for answers, and sends as many requests.
    pub fn turn(&mut self) -> io::Result<()> {
        self.send()?;
        let mut input = std::mem::take(&mut self.input);
        let got = self.stream.read(&mut input)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut parser = std::mem::take(&mut self.parser);
        let fed = parser.feed(&input[..got], |head| self.take(head));
        (self.input, self.parser) = (input, parser);
        fed
    }

    /// Waits until no request is in flight.
    pub fn end(mut self) -> io::Result<()> {
        self.ending = true;
        while self.in_flight > 0 {
            self.turn()?;
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.output)?;
        self.output.clear();
        Ok(())
    }

    fn request(&mut self, tag: u32) {
        let Work { kind, length_bytes, units, ref mut order } = self.work;
        let offset_bytes = order.below(units) * u64::from(length_bytes);
        let mut head = Head::command(kind, tag, self.lun, offset_bytes, length_bytes);
        head.put(24, self.command_number);
        head.put(28, self.status_number);
        self.command_number = self.command_number.wrapping_add(1);
        let brought = match kind {
            Kind::Write => self.agreed.immediate_bytes.min(length_bytes as usize),
            _ => 0,
        };
        head.put_data_bytes(brought);
        self.output.extend_from_slice(&head.0);
        self.output.extend_from_slice(&self.payload[..brought]);
        self.in_flight += 1;
    }

    /// Records the sequence numbers of an answer.
    fn note(&mut self, head: &Head) {
        self.status_number = head.number(24).wrapping_add(1);
        self.commands_max = head.number(32);
    }

    fn take(&mut self, head: &Head) -> io::Result<()> {
        if head.opcode() == opcode::DATA_IN && head.0[1] & 1 == 0 {
            return Ok(());
        }
        match head.opcode() {
            opcode::DATA_IN | opcode::RESPONSE => {
                self.note(head);
                self.answered += 1;
                self.in_flight -= 1;
                let refused = head.opcode() == opcode::RESPONSE && head.0[2] != 0;
                if refused || head.0[3] != 0 {
                    return Err(wrong(format!("a request was answered with status {}", head.0[3])));
                }
                if self.work.kind != Kind::Ask && !self.ending {
                    self.request(head.tag());
                }
                Ok(())
            }
            opcode::READY => {
                self.bring(head);
                Ok(())
            }
            opcode::NOP_IN => {
                let mut pong = Head::new(0x40 | opcode::NOP_OUT, 0x80, NO_TAG);
                pong.put(20, head.number(20));
                pong.put(24, self.command_number);
                pong.put(28, self.status_number);
                if head.number(20) != NO_TAG {
                    self.output.extend_from_slice(&pong.0);
                }
                Ok(())
            }
            other => Err(wrong(format!("a PDU of kind {other:#x} was not expected"))),
        }
    }

    /// Sends the data that the target requests.
    fn bring(&mut self, ready: &Head) {
        let (start, length) = (ready.number(40) as usize, ready.number(44) as usize);
        let end = (start + length).min(self.payload.len());
        for (number, from) in (0..).zip((start..end).step_by(self.agreed.segment_bytes)) {
            let to = end.min(from + self.agreed.segment_bytes);
            let last = if to == end { 0x80 } else { 0 };
            let mut head = Head::new(opcode::DATA_OUT, last, ready.tag());
            head.0[9] = self.lun;
            head.put(20, ready.number(20));
            head.put(28, self.status_number);
            head.put(36, number);
            head.put(40, u32::try_from(from).expect("a write is short"));
            head.put_data_bytes(to - from);
            self.output.extend_from_slice(&head.0);
            self.output.extend_from_slice(&self.payload[from..to]);
        }
    }

    /// READ CAPACITY (10). No other request may be in flight.
    fn capacity_bytes(&mut self) -> io::Result<u64> {
        let mut head = Head::command(Kind::Ask, 0, self.lun, 0, 8);
        head.0[1] = 0xc0;
        head.0[32..].fill(0);
        head.0[32] = 0x25;
        head.put(24, self.command_number);
        head.put(28, self.status_number);
        self.command_number = self.command_number.wrapping_add(1);
        self.stream.write_all(&head.0)?;
        let (head, data) = receive(&mut self.stream)?;
        self.note(&head);
        let last = data.first_chunk::<4>().filter(|_| head.opcode() == opcode::DATA_IN);
        let last = last.ok_or_else(|| wrong("the target did not tell its size"))?;
        Ok((u64::from(u32::from_be_bytes(*last)) + 1) * u64::from(SECTOR_BYTES))
    }
}

/// Reads one whole PDU. No other PDU may be in flight.
fn receive(stream: &mut TcpStream) -> io::Result<(Head, Vec<u8>)> {
    let mut head = Head([0; HEAD_BYTES]);
    stream.read_exact(&mut head.0)?;
    let mut data = vec![0; head.data_bytes().next_multiple_of(4)];
    stream.read_exact(&mut data)?;
    Ok((head, data))
}

/// Both stages of a login. Returns what was negotiated, and the number of the next answer.
fn log_in(stream: &mut TcpStream, target: &str) -> io::Result<(Agreed, u32)> {
    const STAGES: [u8; 2] = [0x81, 0x87];
    let texts = [
        format!(
            "InitiatorName=iqn.2026-11.org.perigee.test:load\0TargetName={target}\0\
             SessionType=Normal\0AuthMethod=None\0"
        ),
        format!(
            "HeaderDigest=None\0DataDigest=None\0MaxRecvDataSegmentLength={SEGMENT_BYTES}\0\
             InitialR2T=No\0ImmediateData=Yes\0FirstBurstLength=262144\0MaxBurstLength=1048576\0\
             MaxOutstandingR2T=1\0ErrorRecoveryLevel=0\0MaxConnections=1\0"
        ),
    ];
    let (mut segment, mut burst, mut immediate) = (THEIR_SEGMENT_BYTES, FIRST_BURST_BYTES, true);
    let mut status_number = 0;
    for (flags, text) in STAGES.into_iter().zip(texts) {
        let mut head = Head::new(0x40 | opcode::LOGIN, flags, 1);
        head.0[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, 1]);
        head.put(24, 1);
        head.put(28, status_number);
        head.put_data_bytes(text.len());
        let mut bytes = head.0.to_vec();
        bytes.extend(text.bytes());
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        stream.write_all(&bytes)?;
        let (answer, data) = receive(stream)?;
        if answer.opcode() != opcode::LOGIN_RESPONSE || answer.0[36] != 0 {
            let status = (answer.0[36], answer.0[37]);
            return Err(wrong(format!("the target refused the login with status {status:?}")));
        }
        let text = String::from_utf8_lossy(&data);
        for (key, value) in text.split('\0').filter_map(|pair| pair.split_once('=')) {
            let number = || value.parse().map_err(|_| wrong(format!("{key}={value}")));
            match key {
                "MaxRecvDataSegmentLength" => segment = number()?,
                "FirstBurstLength" => burst = number()?,
                "ImmediateData" => immediate = value == "Yes",
                _ => {}
            }
        }
        status_number = answer.number(24).wrapping_add(1);
    }
    let segment_bytes = segment.clamp(SECTOR_BYTES as usize, SEGMENT_BYTES);
    let immediate_bytes = if immediate { burst.min(segment_bytes) } else { 0 };
    Ok((Agreed { segment_bytes, immediate_bytes }, status_number))
}
