//! The verbs of the lab's provider: one JSON object comes in, and one goes out.

use std::time::{SystemTime, UNIX_EPOCH};

use perigee_model::Problem;
use perigee_model::rental::{CloudErrorKind, InstanceState, NewInstance, Notice};
use serde::de::{DeserializeOwned, IntoDeserializer as _};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::instance;
use super::offers::INSTANCES_MAX;
use super::records::{Record, Records};
use super::snapshots;
use super::zone;
use crate::state::LabFile;
use crate::up::Lab;

/// An instance that is gone is listed for so long.
const GONE_LISTED_S: u64 = 3600;

/// What a provider is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// What can be rented: no fields; `offers`.
    Offers,
    /// An instance: [`NewInstance`]; `instance`.
    Create,
    /// The instances of a cluster: `cluster`; `instances`.
    List,
    /// Ends an instance: `instance`; no fields.
    End,
    /// Which instances are taken back: `cluster`; `notices`.
    Notices,
    /// A snapshot of the disk of a pool: [`perigee_model::kept::NewSnapshot`]; `snapshot`.
    Snapshot,
    /// The snapshots of a cluster: `cluster`; `snapshots`.
    Snapshots,
    /// Deletes a snapshot: `snapshot`; no fields.
    DeleteSnapshot,
}

/// Why a verb was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// What follows.
    pub kind: CloudErrorKind,
    /// Why, for people.
    pub message: String,
}

impl Failure {
    pub(super) fn new(kind: CloudErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    pub(super) fn refused(message: impl Into<String>) -> Self {
        Self::new(CloudErrorKind::Refused, message)
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self::new(CloudErrorKind::Unclear, problem.to_string())
    }
}

/// The object that the program prints, and whether the verb was carried out: otherwise the object has `error`.
pub async fn answer(lab: &Lab, verb: Verb, asked: &str) -> (Value, bool) {
    match carry_out(lab, verb, asked).await {
        Ok(answer) => (answer, true),
        Err(failure) => (json!({ "error": failure }), false),
    }
}

async fn carry_out(lab: &Lab, verb: Verb, asked: &str) -> Result<Value, Failure> {
    let records = Records::new(lab.lab_dir());
    match verb {
        Verb::Offers => {
            let offers = lab.definition.rent.offers(&lab.definition, now_unix_ms() / 1000);
            Ok(json!({ "offers": offers }))
        }
        Verb::Create => {
            let made = create(lab, &records, &read(asked)?).await?;
            Ok(json!({ "instance": made.told() }))
        }
        Verb::List => {
            let OfCluster { cluster } = read(asked)?;
            let now_ms = now_unix_ms();
            let mut all = records.all()?;
            all.retain(|record| record.cluster == cluster && is_listed(record, now_ms));
            let instances: Vec<_> = all.iter().map(Record::listed).collect();
            Ok(json!({ "instances": instances }))
        }
        Verb::End => {
            let OfInstance { instance } = read(asked)?;
            end(lab, &records, &instance).await?;
            Ok(json!({}))
        }
        Verb::Notices => {
            let OfCluster { cluster } = read(asked)?;
            let notices = notices(&records, &cluster)?;
            Ok(json!({ "notices": notices }))
        }
        Verb::Snapshot => {
            let taken = snapshots::take(lab, &records, &read(asked)?).await?;
            Ok(json!({ "snapshot": taken }))
        }
        Verb::Snapshots => {
            let OfCluster { cluster } = read(asked)?;
            Ok(json!({ "snapshots": snapshots::list(&records, &cluster)? }))
        }
        Verb::DeleteSnapshot => {
            let OfSnapshot { snapshot } = read(asked)?;
            snapshots::delete(&records, &snapshot).await?;
            Ok(json!({}))
        }
    }
}

#[derive(Debug, Deserialize)]
struct OfCluster {
    cluster: String,
}

#[derive(Debug, Deserialize)]
struct OfInstance {
    instance: String,
}

#[derive(Debug, Deserialize)]
struct OfSnapshot {
    snapshot: String,
}

/// Nothing of what was asked is in the error: it may have a token.
fn read<T: DeserializeOwned>(asked: &str) -> Result<T, Failure> {
    serde_json::from_str(asked).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        Failure::refused(format!(
            "the request is not what the verb takes: line {line}, column {column}"
        ))
    })
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn is_listed(record: &Record, now_ms: u64) -> bool {
    record.is_there() || record.asked_unix_ms.saturating_add(GONE_LISTED_S * 1000) > now_ms
}

async fn create(lab: &Lab, records: &Records, new: &NewInstance) -> Result<Record, Failure> {
    let _lock = records.lock().await?;
    let all = records.all()?;
    let known = all.iter().find(|r| r.rental == new.rental && r.cluster == new.cluster);
    if let Some(known) = known {
        // One whose maker was killed half-way is made anew.
        if known.state == InstanceState::Pending && known.machine.is_none() {
            return Ok(instance::begin(&file(lab)?, records, known.clone(), new).await?);
        }
        return Ok(known.clone());
    }
    check(lab, records, new, &all)?;
    let taken: Vec<u8> = all.iter().filter(|r| r.is_there()).map(|record| record.number).collect();
    let free = lab.definition.rented_addresses().find(|(number, _)| !taken.contains(number));
    let Some((number, address)) = free else {
        let message = format!("a lab has room for {INSTANCES_MAX} instances at once");
        return Err(Failure::new(CloudErrorKind::Quota, message));
    };
    let record = Record::new(new, (number, address.to_string()), now_unix_ms());
    records.put(&record)?;
    Ok(instance::begin(&file(lab)?, records, record, new).await?)
}

fn file(lab: &Lab) -> Result<LabFile, Problem> {
    lab.lab_dir().load()
}

fn check(lab: &Lab, records: &Records, new: &NewInstance, all: &[Record]) -> Result<(), Failure> {
    let rent = &lab.definition.rent;
    let Some(kind) = rent.kind(&new.kind) else {
        return Err(Failure::refused(format!("the lab has no kind {:?}", new.kind)));
    };
    if !zone(&lab.definition, &new.zone).is_some_and(|site| rent.has_zone(&site)) {
        return Err(Failure::refused(format!("the lab rents out no hosts in {:?}", new.zone)));
    }
    if new.spot && kind.spot_price.is_none() {
        return Err(Failure::refused(format!("the lab has no {} that it takes back", new.kind)));
    }
    if new.kvm && !kind.kvm {
        return Err(Failure::refused(format!("VMs on a {} can't use KVM", new.kind)));
    }
    if let Some(refusal) = records.refusal() {
        return Err(told_to_refuse(&refusal));
    }
    if rent.no_capacity.contains(&new.kind) {
        let message = format!("no {} is free in {}", new.kind, new.zone);
        return Err(Failure::new(CloudErrorKind::NoCapacity, message));
    }
    let there = all.iter().filter(|record| record.is_there()).count();
    if there >= rent.quota {
        let message = format!("{there} instances are there, and the quota is {}", rent.quota);
        return Err(Failure::new(CloudErrorKind::Quota, message));
    }
    Ok(())
}

fn told_to_refuse(text: &str) -> Failure {
    let (word, why) = text.trim().split_once(char::is_whitespace).unwrap_or((text.trim(), ""));
    let kind: Result<_, serde::de::value::Error> =
        CloudErrorKind::deserialize(word.into_deserializer());
    let kind = kind.unwrap_or(CloudErrorKind::Unclear);
    Failure::new(kind, if why.is_empty() { "the lab was told to refuse" } else { why })
}

async fn end(lab: &Lab, records: &Records, id: &str) -> Result<(), Failure> {
    if !id.starts_with("i-") || id.contains('/') {
        return Err(Failure::refused(format!("{id:?} is no instance of a lab")));
    }
    let _lock = records.lock().await?;
    // One that is not known has ended long ago.
    match records.get(id)? {
        Some(record) if record.is_there() => {
            Ok(instance::end(&lab.definition, records, record).await?)
        }
        Some(_) | None => Ok(()),
    }
}

fn notices(records: &Records, cluster: &str) -> Result<Vec<Notice>, Problem> {
    let mut notices = Vec::new();
    for record in records.all()? {
        if record.cluster != cluster || !record.is_there() {
            continue;
        }
        if let Some(ends_unix_s) = records.ends_unix_s(&record.id)? {
            notices.push(Notice { instance: record.id, ends_unix_s });
        }
    }
    Ok(notices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_of_a_refusal_is_its_kind_as_the_answer_has_it() {
        let told = told_to_refuse("no-capacity none is free\n");
        assert_eq!(
            (told.kind, told.message.as_str()),
            (CloudErrorKind::NoCapacity, "none is free")
        );
        assert_eq!(told_to_refuse("quota").message, "the lab was told to refuse");
        assert_eq!(told_to_refuse("nonsense").kind, CloudErrorKind::Unclear);
    }
}
