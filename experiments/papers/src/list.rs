//! The papers, and each of their figures and tables in the papers' order, in our words. What a section measures without a figure, and an
//! experiment here repeats, is listed by the section's number.

use serde::Serialize;

type Text = &'static str;

#[derive(Debug, Serialize)]
pub struct Paper {
    /// As the experiments' judgements name it.
    pub number: Text,
    pub authors: Text,
    pub title: Text,
    #[serde(skip)]
    pub items: &'static [Item],
}

/// One figure or table.
#[derive(Debug, Serialize)]
pub struct Item {
    pub number: Text,
    pub shows: Text,
    pub kind: Kind,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It has nothing to agree with. This file says what is so here.
    Drawing(Text),
    /// Machines and settings, which are not to agree. Ours are in the report of this experiment.
    Setting(Text),
    /// `by`: the experiments that repeat it.
    Measured { theirs: Text, by: &'static [Text] },
    /// A measurement that another paper, or another figure, has too.
    Same { theirs: Text, as_of: Text },
}

const fn drawing(number: Text, shows: Text, here: Text) -> Item {
    Item { number, shows, kind: Kind::Drawing(here) }
}

const fn setting(number: Text, shows: Text, of: Text) -> Item {
    Item { number, shows, kind: Kind::Setting(of) }
}

const fn measured(number: Text, shows: Text, theirs: Text, by: &'static [Text]) -> Item {
    Item { number, shows, kind: Kind::Measured { theirs, by } }
}

const fn same(number: Text, shows: Text, theirs: Text, as_of: Text) -> Item {
    Item { number, shows, kind: Kind::Same { theirs, as_of } }
}

const VMS: &str = "ARCHITECTURE.md";
const ISCSI: &str = "crates/iscsi/src/lib.rs";
const CLUSTER: &str = "experiments/seeds/src/bench.rs";

const SEEDS: &[&str] = &["seeds"];
const SEEDS_AND_PLACEMENT: &[&str] = &["seeds", "placement"];
const CLOUD: &[&str] = &["cloud-basics"];
const STORM: &[&str] = &["boot-storm"];
const STAGING: &[&str] = &["staging"];

// A line for each.
#[rustfmt::skip]
pub static PAPERS: [Paper; 5] = [
    Paper {
        number: "000",
        authors: "Toyoshima, Yamaguchi, Oguchi",
        title: "Storage access optimization with virtual machine migration during execution of parallel data processing on a virtual machine PC cluster",
        items: &[
            drawing("Fig. 1", "A hypervisor and its guests", VMS),
            drawing("Fig. 2", "The layers of iSCSI", ISCSI),
            drawing("Fig. 3", "One network for ranks and storage", CLUSTER),
            measured("III.C", "Programs with one network for all", "They are bound by CPU or I/O, and not by the network.", SEEDS),
            setting("Table I", "The machines and programs", "seeds"),
            drawing("Fig. 4", "Four servers and two targets at two sites", CLUSTER),
            measured("Fig. 5", "DBT-3's time against the round trip, over iSCSI", "The time grows from 1 to 16 ms, and severely beyond 4 ms.", SEEDS_AND_PLACEMENT),
            measured("Fig. 6", "HPA's time against the round trip, with 20 MB", "The time hardly changes.", SEEDS),
            measured("Fig. 7", "The initiator's CPU with DBT-3", "The CPU has a margin.", SEEDS),
            measured("Fig. 8", "The target's CPU with DBT-3", "The CPU has a margin.", SEEDS),
            measured("Fig. 9", "The initiator's CPU with HPA", "Almost 100 % are used.", SEEDS),
            measured("Fig. 10", "The initiator's memory with DBT-3", "Almost 100 % are used, with the disk cache.", SEEDS),
            measured("Fig. 11", "The target's memory with DBT-3", "Almost 100 % are used: the target is a cache of the initiator.", SEEDS),
            drawing("Fig. 12", "Six servers and two targets, before the migration", CLUSTER),
            drawing("Fig. 13", "The same, after the migration", CLUSTER),
            measured("Fig. 14", "The time of a migration against the round trip", "21 s from 0 to 4 ms, and 52 s at 16 ms.", SEEDS_AND_PLACEMENT),
            measured("Fig. 15", "A migration and DBT-3 at the data, beside DBT-3 far from it", "Both together take less time when the round trip is long.", SEEDS_AND_PLACEMENT),
            measured("VI", "Their future work", "A system that migrates VMs to a remote site by itself when the load is heavy.", SEEDS),
        ],
    },
    Paper {
        number: "001",
        authors: "Toyoshima, Yamaguchi, Oguchi (in Japanese)",
        title: "An evaluation of the load balancing of a virtual machine PC cluster, and a study of its application to a real cloud",
        items: &[
            drawing("Fig. 1", "A hypervisor and its guests", VMS),
            drawing("Fig. 2", "The layers of iSCSI", ISCSI),
            same("2.4", "Programs with one network for all", "They are not bound by the network.", "000 III.C"),
            setting("Table 1", "The machines and programs", "seeds"),
            drawing("Fig. 3", "Four servers and two targets at two sites", CLUSTER),
            same("Fig. 4", "HPA's time against the round trip", "The time hardly changes.", "000 Fig. 6"),
            same("Fig. 5", "DBT-3's time against the round trip, over iSCSI", "The time grows with the round trip.", "000 Fig. 5"),
            drawing("Fig. 6", "Six servers and two targets, before the migration", CLUSTER),
            same("Fig. 7", "The time of a migration against the round trip", "21 s from 0 to 8 ms, and 52 s at 16 ms.", "000 Fig. 14"),
            same("Fig. 8", "A migration and DBT-3 at the data, beside DBT-3 far from it", "The longer the round trip, the more is gained.", "000 Fig. 15"),
            setting("Table 2", "The two kinds of EC2's instances", "cloud-basics"),
            measured("Fig. 9", "Networks of the cluster and of EC2", "The network between EC2's instances is slower than the cluster's.", CLOUD),
            measured("Fig. 10", "Local disks of the cluster and of EC2", "EC2's are faster than the cluster's.", CLOUD),
            measured("Fig. 11", "iSCSI disks of the cluster and of EC2", "The cluster's and those of the instance with more CPU are about equally fast.", CLOUD),
            measured("Fig. 12", "The network between the cluster and EC2", "It is faster when the cluster sends.", CLOUD),
        ],
    },
    Paper {
        number: "002",
        authors: "Zhu",
        title: "The performance analysis of a service deployment system based on the centralized storage",
        items: &[
            drawing("Fig. 1", "The path of a request to the storage server", "docs/dev/boot.md"),
            setting("Table 1", "The storage server", "boot-storm"),
            setting("Table 2", "The clients", "boot-storm"),
            measured("Fig. 2", "64 clients boot together; the server's memory has 1 to 4 GiB", "2 GiB instead of 1 bring 210 s down to 140 s and the snapshots' reloads from 114 to 32. More memory brings hardly more.", STORM),
            measured("Fig. 3", "Response times with source and snapshots on one device, and on two", "Apart they are shorter: all are up after 210 s instead of 258 s.", STORM),
            measured("Fig. 4", "Response times with space allocated on demand", "They are below 20 ms in each test, and above with fixed allocation (figure 3), since what is used lies close together.", STORM),
        ],
    },
    Paper {
        number: "003",
        authors: "Goiri, Julià, Guitart",
        title: "Efficient data management support for virtualized service providers",
        items: &[
            drawing("Fig. 1", "A scheduler, and a manager of VMs on each host", VMS),
            drawing("Fig. 2", "Inputs and outputs by a repository of files", "crates/repository/src/lib.rs"),
            drawing("Fig. 3", "Each host serves its disks to the others", VMS),
            setting("Table 1", "The speed of both hosts' disks", "cloud-basics"),
            measured("5.2", "The creation of a VM with a local and a remote disk", "6.4 s and 13.5 s at host A, 2.8 s and 5.3 s at host B.", STAGING),
            measured("Table 2", "A file copy and an encoder with a local and a remote disk", "The copy takes 4.1 s and 11.4 s at host A, 11.3 s and 21.0 s at host B. The encoder takes as long with both disks, within 0.2 %.", STAGING),
            measured("Fig. 4", "CPU and network with an encoder that is migrated", "The task's CPU time changes its host. Domain-0 is busy during the migration only. There is no traffic before, much during it, and some after it.", STAGING),
            measured("Table 3", "The time of a migrated encoder beside the expected time", "611 s and 610.67 s from A to B, 613 s and 610.25 s from B to A.", STAGING),
            measured("Fig. 5", "Replies and CPU of Tomcat under load, while its VM is migrated", "It answers all the time at the same rate. Domain-0 is busy during the migration only.", &["reachable"]),
        ],
    },
    Paper {
        number: "004",
        authors: "Toyoshima and others",
        title: "An English paper on VMs that migrate to remote storage, and on the basic performance of Amazon EC2",
        items: &[
            drawing("Fig. 1", "A hypervisor and its guests", VMS),
            drawing("Fig. 2", "The layers of iSCSI", ISCSI),
            drawing("Fig. 3", "One network for ranks and storage", CLUSTER),
            same("3.1", "Programs with one network for all", "They are bound by CPU or I/O, and not by the network.", "000 III.C"),
            setting("Table 1", "The machines and programs", "seeds"),
            drawing("Fig. 4", "Four servers and two targets at two sites", CLUSTER),
            same("Fig. 5", "DBT-3's time against the round trip, over iSCSI", "The time grows from 1 to 16 ms, and severely beyond 4 ms.", "000 Fig. 5"),
            same("Fig. 6", "HPA's time against the round trip, with 20 MB", "The time hardly changes.", "000 Fig. 6"),
            drawing("Fig. 7", "Four servers and one target", CLUSTER),
            measured("Fig. 8", "DBT-3 over iSCSI on real and on virtual machines", "Virtual machines are a little slower than the real ones. DomainU is faster than Domain0.", SEEDS),
            drawing("Fig. 9", "Six servers and two targets, before the migration", CLUSTER),
            drawing("Fig. 10", "The same, after the migration", CLUSTER),
            same("Fig. 11", "The time of a migration against the round trip", "21 s from 0 to 4 ms, and 52 s at 16 ms.", "000 Fig. 14"),
            same("Fig. 12", "A migration and DBT-3 at the data, beside DBT-3 far from it", "Both together take less time when the round trip is long.", "000 Fig. 15"),
            measured("Fig. 13", "Networks of the cluster and of EC2", "The cluster's is about 4.5 times as fast.", CLOUD),
            measured("Fig. 14", "Local and iSCSI disks of EC2, write", "iSCSI is significantly slower, which comes from the network.", CLOUD),
            measured("Fig. 15", "Local and iSCSI disks of EC2, read", "iSCSI is significantly slower, which comes from the network.", CLOUD),
        ],
    },
];
