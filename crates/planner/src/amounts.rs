//! How much memory the VMs have that may have more or less of it while they run.
//!
//! Such a VM has a range. Its least is its own; what it has above that is lent, by balloon. At each look, in this order:
//!
//! 1. **What is lacking is given back.** A host lacks memory if its VMs together have more than there is for VMs, if less than its reserve is
//!    available, or if its tasks wait for memory ([`STALLED`]). A tenant lacks memory if its VMs together have more than its quota. First
//!    the VMs give that have more than they need, then all that have anything left. No guest is asked for what its programs use: it would
//!    have to swap or to end one.
//! 2. **What is left is lent** to the VMs that need more, where neither their host nor their tenant lacks any. If it does not do for all,
//!    each gets the same part of what it needs.
//!
//! A VM that needs no more keeps what it has as long as nobody lacks it, so that memory does not go to and fro.
//!
//! What is not known changes nothing. A guest that does not say what it uses keeps what it has, and a host of which it is not known what
//! is available lends nothing.

use std::collections::{BTreeMap, BTreeSet};

use perigee_model::units::{format_bytes, format_duration};
use perigee_model::{HostId, VmId};

const MIB: u64 = 1 << 20;

/// A guest has enough if so much is available to its programs, or [`CUSHION_PART`] of what they use.
const CUSHION_BYTES: u64 = 64 * MIB;

/// One part of so many of what a guest uses is to be available beside that.
const CUSHION_PART: u64 = 4;

/// What a guest keeps available when it gives back.
const KEPT_AVAILABLE_BYTES: u64 = 32 * MIB;

/// Less is not lent or asked for.
const STEP_BYTES: u64 = 8 * MIB;

/// Tasks that wait for memory in more than this share of the last 10 s show that a host lacks memory.
pub const STALLED: f64 = 0.1;

/// A host whose tasks wait for memory gets back one part of so many of its memory at each look.
const STALLED_PART: u64 = 32;

/// A guest that has not given back what it was asked for after so many seconds is counted with what it has.
pub const GIVES_BACK_IN_S: u64 = 60;

/// What was seen at one time.
#[derive(Debug, Clone, Default)]
pub struct Look {
    /// The hosts of these VMs, each once.
    pub hosts: Vec<HostMemory>,
    /// The VMs that have a range, each once.
    pub vms: Vec<VmMemory>,
    /// The tenants that have a quota of memory.
    pub tenants: BTreeMap<String, TenantMemory>,
}

/// A host in a [`Look`]. All amounts are bytes.
#[derive(Debug, Clone)]
pub struct HostMemory {
    /// Which host.
    pub host: HostId,
    /// What it has for VMs.
    pub for_vms_bytes: u64,
    /// What VMs have that are not in the look.
    pub taken_bytes: u64,
    /// What is to stay available for the host itself.
    pub reserve_bytes: u64,
    /// What can be used without swapping; `None` if that is not known.
    pub available_bytes: Option<u64>,
    /// The share of the last 10 s in which tasks waited for memory (`some` of PSI), 0 to 1; `None`, without PSI, shows nothing.
    pub stalled: Option<f64>,
}

/// A VM in a [`Look`]. All amounts are bytes.
#[derive(Debug, Clone)]
pub struct VmMemory {
    /// Which VM.
    pub vm: VmId,
    /// Where it runs.
    pub host: HostId,
    /// Whose it is.
    pub tenant: String,
    /// What it always has.
    pub least_bytes: u64,
    /// What it may have; above the least.
    pub most_bytes: u64,
    /// What its guest has; `None` if that is not known.
    pub has_bytes: Option<u64>,
    /// How much of that its programs can still get; `None` if its guest does not say.
    pub available_bytes: Option<u64>,
    /// What its guest was last asked to have, and the seconds since; `None` if nobody knows that.
    pub asked: Option<(u64, u64)>,
    /// Whether it can be changed: its guest runs, and it does not move.
    pub may_change: bool,
}

/// A tenant in a [`Look`]. All amounts are bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct TenantMemory {
    /// What its VMs may have together.
    pub quota_bytes: u64,
    /// What those have that are not in the look.
    pub taken_bytes: u64,
}

/// What becomes of a VM's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    /// Which VM.
    pub vm: VmId,
    /// What its guest is asked to have from now on; `None`: nothing is asked.
    pub bytes: Option<u64>,
    /// What it can't give back, at least its least.
    pub keeps_bytes: u64,
    /// Why it has what it has, in plain words.
    pub reason: String,
}

impl VmMemory {
    /// What its programs and its kernel use; `None` if its guest does not say.
    fn used(&self) -> Option<u64> {
        Some(self.has_bytes?.saturating_sub(self.available_bytes?))
    }

    /// Whether it was asked to give back what it still has.
    fn owes(&self) -> Option<(u64, u64)> {
        let (asked, age_s) = self.asked?;
        let owed = self.has_bytes?.saturating_sub(asked.max(self.least_bytes));
        (owed >= STEP_BYTES).then_some((owed, age_s))
    }

    /// Whether it has owed that for too long.
    pub fn is_overdue(&self) -> bool {
        self.owes().is_some_and(|(_, age_s)| age_s >= GIVES_BACK_IN_S)
    }

    /// What it owes, and may still give in time, in bytes.
    pub fn on_its_way_back(&self) -> u64 {
        self.owes().filter(|(_, age_s)| *age_s < GIVES_BACK_IN_S).map_or(0, |(owed, _)| owed)
    }

    /// What it has at least, as far as that is known.
    fn surely_has(&self) -> u64 {
        let has = self.has_bytes.unwrap_or(self.least_bytes);
        has.saturating_sub(self.on_its_way_back()).max(self.least_bytes)
    }

    /// What it has at most, as far as that is known.
    fn may_have(&self) -> u64 {
        self.has_bytes.unwrap_or(self.most_bytes).max(self.least_bytes)
    }

    /// What it would have with enough available.
    fn wanted(&self) -> Option<u64> {
        let used = self.used()?;
        Some(used.saturating_add(cushion(used)).clamp(self.least_bytes, self.most_bytes))
    }

    /// What it needs now, 0 if enough is available.
    fn needs(&self) -> u64 {
        let (Some(has), Some(available), Some(used)) =
            (self.has_bytes, self.available_bytes, self.used())
        else {
            return 0;
        };
        // Between this and the cushion nothing changes.
        let is_short = available < cushion(used) / 4 * 3;
        let needs = self.wanted().map_or(0, |wanted| wanted.saturating_sub(has));
        if is_short && self.may_change && needs > 0 { needs } else { 0 }
    }

    /// The least that it can have without swapping or ending a program.
    fn keeps(&self) -> u64 {
        match (self.has_bytes, self.used()) {
            (Some(has), Some(used)) => {
                used.saturating_add(KEPT_AVAILABLE_BYTES).min(has).max(self.least_bytes)
            }
            // It has just started, or gives back: what it uses is not known yet.
            _ if self.asked.is_some_and(|(_, age_s)| age_s < GIVES_BACK_IN_S) => {
                self.asked.map_or(self.least_bytes, |(bytes, _)| bytes.max(self.least_bytes))
            }
            _ => self.may_have(),
        }
    }
}

fn cushion(used_bytes: u64) -> u64 {
    (used_bytes / CUSHION_PART).max(CUSHION_BYTES)
}

/// A VM while it is decided about.
struct Turn<'a> {
    of: &'a VmMemory,
    /// What it is to have.
    target: u64,
    /// Why less is lent than it needs.
    lacks: Option<String>,
    /// Why it gives back.
    gives: Option<String>,
}

impl Turn<'_> {
    /// What it gives until it has what it wants; then until it has what it keeps.
    fn can_give(&self, all: bool) -> u64 {
        let floor = if all { Some(self.of.keeps()) } else { self.of.wanted() };
        let known = self.of.may_change && self.of.used().is_some() && self.of.has_bytes.is_some();
        floor.filter(|_| known).map_or(0, |floor| self.target.saturating_sub(floor))
    }
}

/// Decides about all VMs of the look.
pub fn decide(look: &Look) -> Vec<Decided> {
    let mut turns: Vec<Turn<'_>> = look.vms.iter().map(begin).collect();
    let mut at: BTreeMap<&HostId, Vec<usize>> = BTreeMap::new();
    let mut of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (number, vm) in look.vms.iter().enumerate() {
        at.entry(&vm.host).or_default().push(number);
        of.entry(vm.tenant.as_str()).or_default().push(number);
    }
    let here = |host: &HostMemory| at.get(&host.host).map_or(&[][..], Vec::as_slice);
    let its = |tenant: &str| of.get(tenant).map_or(&[][..], Vec::as_slice);
    let mut lacking = BTreeSet::new();
    for host in &look.hosts {
        let (lacks, why) = lacks(host, &look.vms, here(host));
        if lacks > 0 {
            lacking.insert(&host.host);
            give_back(&mut turns, here(host), lacks, &why);
        }
    }
    let mut poor = BTreeSet::new();
    for (tenant, memory) in &look.tenants {
        let has = sum(&look.vms, its(tenant.as_str()), VmMemory::surely_has);
        let lacks = memory.taken_bytes.saturating_add(has).saturating_sub(memory.quota_bytes);
        if lacks > 0 {
            poor.insert(tenant);
            give_back(
                &mut turns,
                its(tenant.as_str()),
                lacks,
                "its tenant has more than its quota",
            );
        }
    }
    for host in &look.hosts {
        if lacking.contains(&host.host) {
            let why = format!("{} lacks memory", host.host);
            here(host).iter().for_each(|number| turns[*number].lacks = Some(why.clone()));
            continue;
        }
        let have = sum(&look.vms, here(host), VmMemory::may_have);
        let by_count = host.for_vms_bytes.saturating_sub(host.taken_bytes).saturating_sub(have);
        let available = host.available_bytes.unwrap_or(0).saturating_sub(host.reserve_bytes);
        let why = match host.available_bytes {
            None => format!("how much memory {} has is not known", host.host),
            Some(_) => format!("{} has no more", host.host),
        };
        lend(&mut turns, here(host), by_count.min(available), &why);
    }
    let known: BTreeSet<&HostId> = look.hosts.iter().map(|host| &host.host).collect();
    for turn in turns.iter_mut().filter(|turn| !known.contains(&turn.of.host)) {
        turn.lacks = Some(format!("what {} has is not known", turn.of.host));
    }
    for (tenant, memory) in &look.tenants {
        let have = sum(&look.vms, its(tenant.as_str()), VmMemory::may_have);
        let room = memory.quota_bytes.saturating_sub(memory.taken_bytes).saturating_sub(have);
        let room = if poor.contains(tenant) { 0 } else { room };
        limit(&mut turns, its(tenant.as_str()), room, "its tenant's quota has no more");
    }
    turns.iter().map(decided).collect()
}

fn begin(of: &VmMemory) -> Turn<'_> {
    // What was lent before and what is on its way back stay so.
    let target = of.surely_has().min(of.most_bytes);
    Turn { of, target, lacks: None, gives: None }
}

fn sum(vms: &[VmMemory], these: &[usize], of: impl Fn(&VmMemory) -> u64) -> u64 {
    these.iter().map(|number| of(&vms[*number])).fold(0, u64::saturating_add)
}

/// How much the host lacks that has these VMs, and why.
fn lacks(host: &HostMemory, vms: &[VmMemory], here: &[usize]) -> (u64, String) {
    let have = sum(vms, here, VmMemory::surely_has);
    let coming = sum(vms, here, VmMemory::on_its_way_back);
    let over = host.taken_bytes.saturating_add(have).saturating_sub(host.for_vms_bytes);
    let short =
        host.available_bytes.map_or(0, |available| host.reserve_bytes.saturating_sub(available));
    let stalled = host.stalled.filter(|share| share.is_finite() && *share > STALLED);
    let wanted = stalled.map_or(0, |_| host.for_vms_bytes / STALLED_PART);
    let by_host = short.max(wanted).saturating_sub(coming);
    let why = match stalled {
        _ if over >= by_host => format!("{} has it for other VMs", host.host),
        Some(share) => {
            let percent = share * 100.0;
            format!("tasks of {} waited for memory in {percent:.0} % of the last 10 s", host.host)
        }
        None => {
            let available = format_bytes(host.available_bytes.unwrap_or(0));
            format!("only {available} of {}'s memory are available", host.host)
        }
    };
    (over.max(by_host), why)
}

/// Has these VMs give back so much, if they have it: first what they don't need.
fn give_back(turns: &mut [Turn<'_>], these: &[usize], lacks: u64, why: &str) {
    let mut lacks = lacks;
    for all in [false, true] {
        let can =
            these.iter().map(|number| turns[*number].can_give(all)).fold(0, u64::saturating_add);
        let taken = lacks.min(can);
        for number in these {
            let turn = &mut turns[*number];
            let part = share_of(taken, turn.can_give(all), can).next_multiple_of(MIB);
            let part = part.min(turn.can_give(all));
            if part > 0 {
                turn.target -= part;
                turn.gives = Some(why.to_owned());
            }
        }
        lacks = lacks.saturating_sub(taken);
    }
}

/// Lends these VMs what they need, as far as there is room.
fn lend(turns: &mut [Turn<'_>], these: &[usize], room: u64, why: &str) {
    let gets = |turn: &Turn<'_>| if turn.gives.is_none() { turn.of.needs() } else { 0 };
    let all = these.iter().map(|number| gets(&turns[*number])).fold(0, u64::saturating_add);
    for number in these {
        let turn = &mut turns[*number];
        let needs = gets(turn);
        let part = whole(share_of(room.min(all), needs, all), needs);
        turn.target = turn.target.saturating_add(part).min(turn.of.most_bytes);
        if part < needs {
            turn.lacks = Some(why.to_owned());
        }
    }
}

/// Takes from what these VMs are to get what there is no room for.
fn limit(turns: &mut [Turn<'_>], these: &[usize], room: u64, why: &str) {
    let gets = |turn: &Turn<'_>| turn.target.saturating_sub(turn.of.may_have());
    let all = these.iter().map(|number| gets(&turns[*number])).fold(0, u64::saturating_add);
    if all <= room {
        return;
    }
    for number in these {
        let turn = &mut turns[*number];
        let got = gets(turn);
        let part = whole(share_of(room, got, all), got);
        turn.target -= got - part;
        if part < got {
            turn.lacks = Some(why.to_owned());
        }
    }
}

/// Whole MiB, and nothing instead of less than a step, unless that is all that is needed.
fn whole(part: u64, needed: u64) -> u64 {
    let part = if part < needed { part / MIB * MIB } else { part };
    if part < STEP_BYTES.min(needed) { 0 } else { part }
}

/// `part` of `of`, taken from `from`; rounded down.
fn share_of(from: u64, part: u64, of: u64) -> u64 {
    let share = (u128::from(from) * u128::from(part)).checked_div(u128::from(of)).unwrap_or(0);
    u64::try_from(share).unwrap_or(u64::MAX)
}

fn decided(turn: &Turn<'_>) -> Decided {
    let vm = turn.of;
    let target = turn.target.clamp(vm.least_bytes, vm.most_bytes);
    // What it was asked for already is asked again only if it has not come to it, as after a reset of its guest.
    let before = match vm.owes() {
        Some((_, age_s)) if age_s < GIVES_BACK_IN_S => vm.surely_has(),
        _ => vm.may_have(),
    };
    let is_known = vm.has_bytes.is_some() && vm.may_change;
    let is_new =
        target.abs_diff(before) >= STEP_BYTES || (target > before && target == vm.most_bytes);
    let bytes = (is_known && is_new).then_some(target);
    let reason = reason(turn, bytes.map(|bytes| (before, bytes)));
    Decided { vm: vm.vm.clone(), bytes, keeps_bytes: vm.keeps(), reason }
}

fn reason(turn: &Turn<'_>, change: Option<(u64, u64)>) -> String {
    let vm = turn.of;
    let Some(has) = vm.has_bytes else { return "its QEMU has not said what it has".to_owned() };
    if !vm.may_change {
        return "it stays as it is while it moves or stands still".to_owned();
    }
    let owes = vm.owes().map(|(owed, age_s)| (format_bytes(owed), format_duration(age_s), age_s));
    if let Some((owed, age, _)) = owes.as_ref().filter(|(_, _, age_s)| *age_s >= GIVES_BACK_IN_S) {
        return format!("its guest was asked for {owed} {age} ago, and has not given them back");
    }
    let Some(available) = vm.available_bytes.map(format_bytes) else {
        return "its guest does not say what it uses: it boots, or has no driver of a balloon"
            .to_owned();
    };
    let needs = vm.needs();
    match (change, &turn.gives, &turn.lacks) {
        (Some((before, to)), Some(why), _) if to < before => {
            format!("gives {} back: {why}", format_bytes(before - to))
        }
        (Some((before, to)), _, None) if to > before => {
            format!(
                "gets {} more: only {available} were available to its programs",
                format_bytes(to - before)
            )
        }
        (Some((before, to)), _, Some(why)) if to > before => {
            let [got, needs] = [to - before, needs].map(format_bytes);
            format!("gets {got} more of the {needs} that it needs: {why}")
        }
        (_, _, Some(why)) if needs > 0 => format!("needs {} more: {why}", format_bytes(needs)),
        (_, Some(why), _) => format!("keeps what its programs use: {why}"),
        _ => match owes {
            Some((owed, ..)) => format!("its guest was asked for {owed}"),
            None if has >= vm.most_bytes => {
                format!("has all that it may have, {available} of it available")
            }
            None => format!("needs no more: {available} are available to its programs"),
        },
    }
}

#[cfg(test)]
mod tests;
