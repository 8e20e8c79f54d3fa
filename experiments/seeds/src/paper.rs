//! For each figure: what Toyoshima's paper says of it, and whether these runs agree. The measurements decide that, so a report never
//! contradicts its own figures. The paper's text names shapes, and hardly any values.

use serde::{Deserialize, Serialize};

use crate::results::{Results, Work};

/// "Almost 100 %", of figures 9 to 11.
pub const ALMOST_ALL: f64 = 1.0;

/// One figure of the paper, theirs and ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// Its number there, or several.
    pub figure: String,
    pub theirs: String,
    pub ours: String,
    /// `None`: a quick run decides nothing, or the paper says nothing that can be compared.
    pub agrees: Option<bool>,
    /// Why the shape differs, if it does.
    pub why: Option<String>,
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

pub fn figures(results: &Results) -> Vec<Figure> {
    let all = [dbt3, hpa, initiator, target, hpa_cpu, initiator_memory, target_memory, domain0];
    let mut figures: Vec<Figure> = all.into_iter().filter_map(|of| of(results)).collect();
    if results.is_quick {
        figures.iter_mut().for_each(|figure| (figure.agrees, figure.why) = (None, None));
    }
    figures
}

fn figure(number: &str, theirs: &str, ours: String, agrees: bool, why: &str) -> Figure {
    Figure {
        figure: number.to_owned(),
        theirs: theirs.to_owned(),
        ours,
        agrees: Some(agrees),
        why: (!agrees).then(|| why.to_owned()),
    }
}

fn dbt3(results: &Results) -> Option<Figure> {
    let far = results.farthest()?;
    let growth = |rtt| results.growth(Work::Tpch, Some(rtt));
    let whole = growth(far)?;
    let until_4 = growth(4).map_or_else(String::new, |it| format!(", {it:.2} times at 4 ms"));
    Some(figure(
        "5",
        "The execution time of DBT-3 grows with the round trip, and severely beyond 4 ms.",
        format!(
            "TPC-H takes {whole:.2} times as long with its data {far} ms away as with local data{until_4}."
        ),
        whole >= 1.2,
        "There each read of the guest waits for one round trip over iSCSI. Here the volume server at the VMs' host reads ahead over the WAN and keeps what it \
         has read, so only the first read of a table goes far, and few reads wait a whole round trip. QEMU's own iSCSI initiator over the same WAN has the paper's shape: \
         experiments/placement has it beside Perigee. Without KVM the queries also compute longer beside the same reads.",
    ))
}

fn hpa(results: &Results) -> Option<Figure> {
    let far = results.farthest()?;
    let growth = results.growth(Work::Hpa, Some(far))?;
    Some(figure(
        "6",
        "The execution time of HPA (20 MB) hardly changes with the round trip.",
        format!("HPA takes {growth:.2} times as long with its data {far} ms away."),
        growth <= 1.25,
        "Its data is small here, so its start and its first reads are a large part of the whole (not measured by itself).",
    ))
}

fn busy(results: &Results, work: Work) -> Option<f64> {
    results.run(work, Some(results.farthest()?))?.means().busy
}

fn initiator(results: &Results) -> Option<Figure> {
    let tpch = busy(results, Work::Tpch)?;
    Some(figure(
        "7",
        "With DBT-3 the initiator's CPU has a margin.",
        format!("The guests' CPUs are busy for {} of the time with TPC-H.", percent(tpch)),
        tpch < 0.9,
        "Without KVM each query computes many times as long as on their Xeons, beside reads that are as fast. And Perigee keeps the reads from waiting. \
         So the CPU has no margin left.",
    ))
}

fn target(results: &Results) -> Option<Figure> {
    let cpus = results.run(Work::Tpch, Some(results.farthest()?))?.means().server_cpus[1]?;
    Some(figure(
        "8",
        "With DBT-3 the target's CPU has a margin too.",
        format!("The volume server at the data's host uses {cpus:.2} CPUs on average."),
        cpus < 0.9,
        "Not known.",
    ))
}

fn hpa_cpu(results: &Results) -> Option<Figure> {
    let hpa = busy(results, Work::Hpa)?;
    Some(figure(
        "9",
        "HPA uses almost 100 % of the initiator's CPU.",
        format!("The guests' CPUs are busy for {} of the time with HPA.", percent(hpa)),
        hpa >= 0.85,
        "The guests wait for each other in HPA's exchanges, and four of them share two CPUs.",
    ))
}

fn initiator_memory(results: &Results) -> Option<Figure> {
    let means = results.run(Work::Tpch, Some(results.farthest()?))?.means();
    let (used, cached) = (means.used_last?, means.cached_last?);
    Some(figure(
        "10",
        "With DBT-3 almost 100 % of the initiator's memory is in use, with the disk cache.",
        format!(
            "At the end {} of the guests' memory is in use, and {} of it all is disk cache.",
            percent(used),
            percent(cached)
        ),
        used >= 0.85,
        "How full the cache is depends on how large the tables are beside the memory: theirs were larger than 2 GB, these fit into 320 MiB, and the queries \
         find them cold because they are dropped from the cache before each one.",
    ))
}

fn target_memory(results: &Results) -> Option<Figure> {
    let bytes = results.run(Work::Tpch, Some(results.farthest()?))?.means().far_resident_bytes?;
    Some(Figure {
        figure: "11".to_owned(),
        theirs: "With DBT-3 almost 100 % of the target's memory is in use, with the disk cache: the initiator uses it as a cache.".to_owned(),
        ours: format!(
            "The volume server's process at the data's host has {:.0} MiB at the end. All hosts of this lab share the machine's disk cache, so the target's can't be told apart.",
            bytes / f64::from(1 << 20)
        ),
        agrees: None,
        why: None,
    })
}

/// Figures 5 and 6 have a line for Domain0 and one for DomainU.
fn domain0(results: &Results) -> Option<Figure> {
    let of = |work: Work| Some(format!("{} {:.1} times", work.words(), results.overhead(work)?));
    let all: Vec<String> = Work::ALL.into_iter().filter_map(of).collect();
    let how = match results.accelerator.as_str() {
        "tcg" => "QEMU interprets the guests here (TCG, no KVM), which is most of this.",
        "kvm" => "The guests run with KVM.",
        _ => "It is not known whether the guests ran with KVM.",
    };
    (!all.is_empty()).then(|| Figure {
        figure: "5 and 6, Domain0 beside DomainU".to_owned(),
        theirs: "The job is given to Domain0 and to DomainU; the text names no difference.".to_owned(),
        ours: format!(
            "With local data, in the VMs as long as on the host itself: {}. {how} On the host four processes share its CPUs, as the four VMs do.",
            all.join(", ")
        ),
        agrees: None,
        why: None,
    })
}
