//! The parts of an iSCSI initiator (RFC 7143) that a replay needs: one session of one connection, no
//! authentication and no digests, many commands at a time. It shares no code with the volume server and works
//! with any target.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{BufMut, Bytes, BytesMut};
use perigee_iscsi_load::wire::{HEAD_BYTES, Head, Kind, NO_TAG, opcode, wrong};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;

/// The longest PDU that is accepted, in either direction of the negotiation.
const SEGMENT_BYTES_MAX: usize = 256 << 10;
/// The longest PDU for a target that does not send a limit (RFC 7143, 13.12).
const TARGET_SEGMENT_BYTES: usize = 8192;

struct Pdu {
    head: Head,
    data: Bytes,
}

impl Pdu {
    fn new(opcode: u8, flags: u8, tag: u32, data: Bytes) -> Self {
        Self { head: Head::new(opcode, flags, tag), data }
    }

    fn encode(mut self) -> Bytes {
        self.head.put_data_bytes(self.data.len());
        let mut bytes = BytesMut::from(&self.head.0[..]);
        bytes.put(self.data);
        bytes.put_bytes(0, bytes.len().next_multiple_of(4) - bytes.len());
        bytes.freeze()
    }

    async fn read(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Self> {
        let mut head = Head([0; HEAD_BYTES]);
        stream.read_exact(&mut head.0).await?;
        let length = head.data_bytes();
        if length > SEGMENT_BYTES_MAX || head.0[4] != 0 {
            return Err(wrong("the target sent a PDU that is too long"));
        }
        let mut data = vec![0; length.next_multiple_of(4)];
        stream.read_exact(&mut data).await?;
        data.truncate(length);
        Ok(Self { head, data: data.into() })
    }
}

/// The length of INQUIRY's standard answer (SPC-4, 6.6.2).
const INQUIRY_BYTES: u32 = 36;

type Answer = oneshot::Sender<io::Result<()>>;

/// A command in flight.
struct Pending {
    /// The data of a write. The target requests them piece by piece.
    data: Bytes,
    answer: Answer,
}

#[derive(Default)]
struct Table {
    commands: HashMap<u32, Pending>,
    next_tag: u32,
    /// All statuses before this one have arrived.
    expected_status: u32,
    /// Why the connection has ended.
    broken: Option<String>,
}

pub struct Initiator {
    table: Arc<Mutex<Table>>,
    out: mpsc::UnboundedSender<Pdu>,
    lun: u8,
    reader: AbortHandle,
}

impl Drop for Initiator {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Initiator {
    /// Logs in to one disk of a target.
    pub async fn open(
        address: SocketAddr,
        target: &str,
        lun: u8,
        initiator: &str,
    ) -> io::Result<Self> {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (segment_bytes, expected_status) = login(&mut stream, target, initiator).await?;
        let (read, write) = stream.into_split();
        let (out, pdus) = mpsc::unbounded_channel();
        let table = Arc::new(Mutex::new(Table { expected_status, ..Table::default() }));
        tokio::spawn(send_all(write, pdus));
        let receive = receive_all(read, Arc::clone(&table), out.clone(), segment_bytes);
        let reader = tokio::spawn(receive).abort_handle();
        let session = Self { table, out, lun, reader };
        // TEST UNIT READY: the first command may be answered with events of the disk since it was created
        // (SAM-5, 5.14: unit attention).
        for _ in 0..3 {
            if session.command(Kind::Ask, 0, 0, Bytes::new()).await.is_ok() {
                // As each initiator asks: one that has known another disk of this name must know that this is another one.
                session.command(Kind::Inquire, 0, INQUIRY_BYTES, Bytes::new()).await?;
                return Ok(session);
            }
        }
        Err(io::Error::other(format!("the disk of {target} is not ready")))
    }

    pub async fn read(&self, offset: u64, length_bytes: u32) -> io::Result<()> {
        self.command(Kind::Read, offset, length_bytes, Bytes::new()).await
    }

    pub async fn write(&self, offset: u64, data: Bytes) -> io::Result<()> {
        let length = u32::try_from(data.len()).map_err(io::Error::other)?;
        self.command(Kind::Write, offset, length, data).await
    }

    pub async fn flush(&self) -> io::Result<()> {
        self.command(Kind::Flush, 0, 0, Bytes::new()).await
    }

    async fn command(
        &self,
        kind: Kind,
        offset: u64,
        length_bytes: u32,
        data: Bytes,
    ) -> io::Result<()> {
        let (answer, answered) = oneshot::channel();
        {
            let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(why) = &table.broken {
                return Err(io::Error::other(why.clone()));
            }
            let tag = table.next_tag;
            table.next_tag = (tag + 1) % NO_TAG;
            table.commands.insert(tag, Pending { data, answer });
            let mut head = Head::command(kind, tag, self.lun, offset, length_bytes);
            head.put(28, table.expected_status);
            let pdu = Pdu { head, data: Bytes::new() };
            // Under the lock, so that the commands are numbered in the order of their tags.
            self.out.send(pdu).map_err(|_| io::Error::other("the connection is gone"))?;
        }
        answered.await.map_err(|_| io::Error::other("the connection is gone"))?
    }
}

/// Both stages of a login without authentication. Returns the longest PDU that the target accepts, and the
/// number of its next status.
async fn login(stream: &mut TcpStream, target: &str, initiator: &str) -> io::Result<(usize, u32)> {
    const SECURITY_TO_OPERATIONAL: u8 = 0x81;
    const OPERATIONAL_TO_FULL: u8 = 0x87;
    let names = format!(
        "InitiatorName={initiator}\0TargetName={target}\0SessionType=Normal\0AuthMethod=None\0"
    );
    let wishes = format!(
        "HeaderDigest=None\0DataDigest=None\0MaxRecvDataSegmentLength={SEGMENT_BYTES_MAX}\0\
         InitialR2T=Yes\0ImmediateData=No\0MaxBurstLength={SEGMENT_BYTES_MAX}\0\
         MaxOutstandingR2T=1\0ErrorRecoveryLevel=0\0MaxConnections=1\0"
    );
    let mut segment_bytes = TARGET_SEGMENT_BYTES;
    let mut status_number = 0;
    for (flags, text) in [(SECURITY_TO_OPERATIONAL, names), (OPERATIONAL_TO_FULL, wishes)] {
        let mut pdu = Pdu::new(0x40 | opcode::LOGIN, flags, 1, text.into_bytes().into());
        // The initiator chooses the ISID. Each login is a session of its own, because the initiators' names
        // differ.
        pdu.head.0[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, 1]);
        pdu.head.put(24, 1);
        pdu.head.put(28, status_number);
        stream.write_all(&pdu.encode()).await?;
        let answer = Pdu::read(stream).await?;
        if answer.head.opcode() != opcode::LOGIN_RESPONSE || answer.head.0[36] != 0 {
            let status = (answer.head.0[36], answer.head.0[37]);
            return Err(wrong(format!("the target refused the login with status {status:?}")));
        }
        status_number = answer.head.number(24).wrapping_add(1);
        for pair in answer.data.split(|byte| *byte == 0) {
            let text = String::from_utf8_lossy(pair);
            if let Some(value) = text.strip_prefix("MaxRecvDataSegmentLength=") {
                segment_bytes = value.parse().map_err(|_| wrong("a length that is no number"))?;
            }
        }
    }
    Ok((segment_bytes.clamp(512, SEGMENT_BYTES_MAX), status_number))
}

/// Numbers the commands and writes them to the connection.
async fn send_all(mut write: OwnedWriteHalf, mut pdus: mpsc::UnboundedReceiver<Pdu>) {
    let mut command_number: u32 = 1;
    while let Some(mut pdu) = pdus.recv().await {
        if pdu.head.opcode() == opcode::COMMAND {
            pdu.head.put(24, command_number);
            command_number = command_number.wrapping_add(1);
        }
        if write.write_all(&pdu.encode()).await.is_err() {
            // The reader notices the end of the connection and answers the waiting commands.
            return;
        }
    }
}

async fn receive_all(
    read: OwnedReadHalf,
    table: Arc<Mutex<Table>>,
    out: mpsc::UnboundedSender<Pdu>,
    segment_bytes: usize,
) {
    let mut read = BufReader::with_capacity(SEGMENT_BYTES_MAX, read);
    let why = loop {
        let pdu = match Pdu::read(&mut read).await {
            Ok(pdu) => pdu,
            Err(error) => break error.to_string(),
        };
        if let Err(error) = take(&pdu, &table, &out, segment_bytes) {
            break error.to_string();
        }
    };
    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
    for (_, pending) in table.commands.drain() {
        let _gone = pending.answer.send(Err(io::Error::other(why.clone())));
    }
    table.broken = Some(why);
}

/// Processes one PDU of the target.
fn take(
    pdu: &Pdu,
    table: &Mutex<Table>,
    out: &mpsc::UnboundedSender<Pdu>,
    segment_bytes: usize,
) -> io::Result<()> {
    let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
    let tag = pdu.head.tag();
    match pdu.head.opcode() {
        opcode::DATA_IN if pdu.head.0[1] & 1 == 0 => Ok(()),
        opcode::DATA_IN | opcode::RESPONSE => {
            let pending = table.commands.remove(&tag).ok_or_else(|| wrong("an unknown tag"))?;
            table.expected_status = pdu.head.number(24).wrapping_add(1);
            let status = (pdu.head.0[2], pdu.head.0[3]);
            let good = pdu.head.opcode() == opcode::DATA_IN && status.1 == 0 || status == (0, 0);
            let failed = || io::Error::other(format!("the target answered with {status:?}"));
            let _gone = pending.answer.send(if good { Ok(()) } else { Err(failed()) });
            Ok(())
        }
        opcode::READY => {
            let pending = table.commands.get(&tag).ok_or_else(|| wrong("an unknown tag"))?;
            let (offset, wanted) = (pdu.head.number(40) as usize, pdu.head.number(44) as usize);
            let end = offset.checked_add(wanted).filter(|end| *end <= pending.data.len());
            let end = end.ok_or_else(|| wrong("the target wants more than there is"))?;
            for (number, start) in (0..).zip((offset..end).step_by(segment_bytes)) {
                let stop = end.min(start + segment_bytes);
                let last = if stop == end { 0x80 } else { 0 };
                let data = pending.data.slice(start..stop);
                let mut piece = Pdu::new(opcode::DATA_OUT, last, tag, data);
                piece.head.0[8..16].copy_from_slice(&pdu.head.0[8..16]);
                piece.head.put(20, pdu.head.number(20));
                piece.head.put(28, table.expected_status);
                piece.head.put(36, number);
                piece.head.put(40, u32::try_from(start).expect("a write is short"));
                out.send(piece).map_err(|_| wrong("the connection is gone"))?;
            }
            Ok(())
        }
        opcode::NOP_IN => {
            let target_tag = pdu.head.number(20);
            if target_tag != NO_TAG {
                let mut pong = Pdu::new(0x40 | opcode::NOP_OUT, 0x80, NO_TAG, Bytes::new());
                pong.head.0[8..16].copy_from_slice(&pdu.head.0[8..16]);
                pong.head.put(20, target_tag);
                out.send(pong).map_err(|_| wrong("the connection is gone"))?;
            }
            Ok(())
        }
        other => Err(wrong(format!("a PDU of kind {other:#x} was not expected"))),
    }
}
