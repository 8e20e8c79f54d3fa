//! PDUs that are neither commands nor their data: pings, task management, texts, logout.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::sync::oneshot;

use super::access::Client;
use super::answers::Answers;
use super::batch::Work;
use super::execute::Disk;
use super::pdu::{Head, NO_TAG, flag, reject, request};
use perigee_model::client::target_name;

use super::session::{PORTAL_GROUP, export_of, is_listed};
use super::tasks::{Ready, managed};
use super::text::{self, TEXT_BYTES_MAX};
use super::{ConnectionError, Shared};

/// Task management functions.
mod function {
    /// One task, by its tag.
    pub const ABORT_TASK: u8 = 1;
    /// All tasks of this session at the unit.
    pub const ABORT_TASK_SET: u8 = 2;
    /// All tasks of all sessions at the unit.
    pub const CLEAR_TASK_SET: u8 = 4;
    /// Ends all tasks at the unit, and the reservations that a reset ends.
    pub const UNIT_RESET: u8 = 5;
    /// The same as [`UNIT_RESET`], because a target has one unit.
    pub const TARGET_WARM_RESET: u8 = 6;
    /// The same again. No connection ends.
    pub const TARGET_COLD_RESET: u8 = 7;
}

/// The rest of a text that does not fit one PDU. The initiator asks for it.
struct Rest {
    ttt: u32,
    text: Vec<u8>,
    sent: usize,
}

/// What a connection has to remember between two PDUs that are no commands: a text that has come, or was sent, in
/// part.
pub struct Requests {
    shared: Arc<Shared>,
    client: Arc<Client>,
    portal: SocketAddr,
    /// The beginning of a text that has not fully arrived.
    cut: Vec<u8>,
    rest: Option<Rest>,
    next_ttt: u32,
}

impl Requests {
    /// `portal` is the address at which the initiator has reached this target: SendTargets tells it.
    pub fn new(shared: Arc<Shared>, client: Client, portal: SocketAddr) -> Self {
        let client = Arc::new(client);
        Self { shared, client, portal, cut: Vec::new(), rest: None, next_ttt: 0 }
    }

    /// Handles a PDU. Returns true if the initiator has logged out.
    pub fn take(
        &mut self,
        head: &Head,
        data: &[u8],
        work: &mut Work<'_>,
    ) -> Result<bool, ConnectionError> {
        match head.opcode() {
            request::NOP_OUT if head.itt() != NO_TAG => {
                work.answers.pong(head.itt(), head.lun(), data);
            }
            // The answer to a ping. Its arrival alone shows that the initiator is alive.
            request::NOP_OUT => {}
            request::TASK_MANAGEMENT => manage(head, work),
            request::TEXT => self.text(head, data, work)?,
            request::LOGOUT => {
                // This closes the session, or its only connection. Recovery is not supported.
                let reason = head.flags() & 0x7f;
                let how = if reason > 1 { 2 } else { 0 };
                work.answers.logged_out(head.itt(), how);
                return Ok(how == 0);
            }
            request::SNACK => work.answers.reject(reject::SNACK, head),
            request::LOGIN => {
                return Err(ConnectionError::Protocol("a login after the login phase"));
            }
            _ => work.answers.reject(reject::NOT_SUPPORTED, head),
        }
        Ok(false)
    }

    fn text(
        &mut self,
        head: &Head,
        data: &[u8],
        work: &mut Work<'_>,
    ) -> Result<(), ConnectionError> {
        if head.ttt() != NO_TAG {
            return match self.rest.take().filter(|rest| rest.ttt == head.ttt()) {
                Some(rest) => {
                    self.send_text(head.itt(), rest, work.answers);
                    Ok(())
                }
                None => {
                    work.answers.reject(reject::INVALID_FIELD, head);
                    Ok(())
                }
            };
        }
        if self.cut.len() + data.len() > TEXT_BYTES_MAX {
            return Err(ConnectionError::Protocol("a text without an end"));
        }
        self.cut.extend(data);
        if head.has(flag::CONTINUE) {
            // The tag has no meaning here, but without one the initiator would not send the next PDU.
            work.answers.text(head.itt(), &[], Some(0));
            return Ok(());
        }
        let bytes = std::mem::take(&mut self.cut);
        let keys = text::parse(&bytes)?;
        let mut answers = text::Answers::default();
        let mut asked = None;
        for (key, value) in keys {
            match key {
                "SendTargets" => asked = Some(value.to_owned()),
                // Negotiated values can't be changed.
                _ => answers.add(key, "Reject"),
            }
        }
        let Some(asked) = asked.filter(|asked| names_targets(asked)) else {
            work.answers.reject(reject::INVALID_FIELD, head);
            return Ok(());
        };
        let itt = head.itt();
        let (shared, client) = (self.shared.clone(), self.client.clone());
        let portal = self.portal;
        work.tasks.start_other(async move {
            let text = targets(&shared, &client, portal, &asked, answers).await;
            Ready::Text { itt, text }
        });
        Ok(())
    }

    /// Sends the first part of a text. The initiator asks for the next one with a new tag.
    pub fn begin_text(&mut self, itt: u32, text: Vec<u8>, answers: &mut Answers) {
        let ttt = self.next_ttt;
        self.next_ttt = (ttt + 1) & 0xffff;
        self.send_text(itt, Rest { ttt, text, sent: 0 }, answers);
    }

    fn send_text(&mut self, itt: u32, mut rest: Rest, answers: &mut Answers) {
        let most = answers.parameters.their_data_bytes_max as usize;
        let end = rest.text.len().min(rest.sent + most);
        let piece = &rest.text[rest.sent..end];
        if end == rest.text.len() {
            answers.text(itt, piece, None);
        } else {
            answers.text(itt, piece, Some(rest.ttt));
            rest.sent = end;
            self.rest = Some(rest);
        }
    }
}

/// Whether this is a valid value of SendTargets: all, the session's own, or a name (RFC 7143, 4.2.7).
fn names_targets(asked: &str) -> bool {
    let names = ["iqn.", "eui.", "naa."];
    matches!(asked, "All" | "") || names.iter().any(|name| asked.starts_with(name))
}

/// The targets that a client may use, with their addresses.
async fn targets(
    shared: &Shared,
    client: &Client,
    portal: SocketAddr,
    asked: &str,
    mut answers: text::Answers,
) -> Vec<u8> {
    let names = shared.exports.names().await.unwrap_or_else(|problem| {
        tracing::error!(%problem, "can't list targets");
        Vec::new()
    });
    let wanted = export_of(asked);
    let address = match portal {
        SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some() => {
            let ip = v6.ip().to_ipv4_mapped().expect("it was just looked at");
            format!("{ip}:{}", v6.port())
        }
        other => other.to_string(),
    };
    for name in names {
        let meant = match &wanted {
            Some(wanted) => *wanted == name,
            None => matches!(asked, "All" | "") && is_listed(&name),
        };
        if meant && client.may_use(&name) {
            answers.add("TargetName", target_name(&name));
            answers.add("TargetAddress", format_args!("{address},{PORTAL_GROUP}"));
        }
    }
    answers.into_bytes()
}

fn manage(head: &Head, work: &mut Work<'_>) {
    let itt = head.itt();
    let Some(disk) = work.disk else {
        return work.answers.reject(reject::PROTOCOL, head);
    };
    let asked = head.flags() & 0x7f;
    let of_target = matches!(asked, function::TARGET_WARM_RESET | function::TARGET_COLD_RESET);
    if !of_target && head.lun() != [0; 8] {
        return work.answers.managed(itt, managed::NO_UNIT);
    }
    match asked {
        function::ABORT_TASK => abort_task(head, work),
        function::ABORT_TASK_SET => {
            work.transfers.abort_all();
            let (done, ended) = oneshot::channel();
            work.tasks.abort_all(done);
            work.tasks.manage(itt, async move { drop(ended.await) });
        }
        function::CLEAR_TASK_SET => {
            let Disk { unit, nexus, .. } = disk.clone();
            work.tasks.manage(itt, async move { unit.clear_tasks(&nexus).await });
        }
        function::UNIT_RESET | function::TARGET_WARM_RESET | function::TARGET_COLD_RESET => {
            // A target has one unit.
            let Disk { unit, nexus, .. } = disk.clone();
            let reset = async move { unit.reset(of_target.then_some(&*nexus)).await };
            work.tasks.manage(itt, reset);
        }
        _ => work.answers.managed(itt, managed::NOT_SUPPORTED),
    }
}

fn abort_task(head: &Head, work: &mut Work<'_>) {
    let (itt, referenced) = (head.itt(), head.ttt());
    if work.transfers.abort(referenced) {
        work.answers.managed(itt, managed::COMPLETE);
        return work.ask_for_data();
    }
    match work.tasks.abort(referenced) {
        Some(ended) => work.tasks.manage(itt, async move { drop(ended.await) }),
        None => work.answers.managed(itt, managed::NO_TASK),
    }
}
