//! What EC2's answers say. What an answer leaves out is not known, and an item without an id is left out, as is a kind without CPUs or memory. A notice without an id is an error.

use std::num::NonZeroU64;

use perigee_model::money::Money;
use perigee_model::rental::{CLUSTER_TAG, Instance, InstanceState, Notice, RENTAL_TAG, is_machine};
use perigee_model::units::parse_time;

use crate::xml::Element;

/// The time between the notice and the end of a spot instance: "Spot Instance interruption notices" in AWS's EC2 user guide.
const NOTICE_S: u64 = 120;
const MARKED: &str = "marked-for-termination";

/// The instances of a cluster in an answer to `DescribeInstances`.
pub fn instances(answer: &Element, cluster: &str) -> Vec<Instance> {
    let reservations = answer.items("reservationSet");
    let instances = reservations.flat_map(|reservation| reservation.items("instancesSet"));
    // EC2 was asked for these only. Should it not understand that, nobody else's instances are ended.
    let ours = instances.filter(|instance| tag(instance, CLUSTER_TAG) == Some(cluster));
    ours.filter_map(instance).collect()
}

/// The instances that a `RunInstances` has made.
pub fn made(answer: &Element) -> Vec<Instance> {
    answer.items("instancesSet").filter_map(instance).collect()
}

fn instance(item: &Element) -> Option<Instance> {
    let text = |way: &str| item.text(way).unwrap_or_default().to_owned();
    Some(Instance {
        id: item.text("instanceId")?.to_owned(),
        rental: tag(item, RENTAL_TAG).map(str::to_owned),
        state: state(item.text("instanceState/name").unwrap_or_default()),
        kind: text("instanceType"),
        zone: text("placement/availabilityZone"),
        spot: item.text("instanceLifecycle") == Some("spot"),
        address: item.text("privateIpAddress").map(str::to_owned),
        started_unix_s: item.text("launchTime").and_then(unix_s),
    })
}

pub fn tag<'a>(item: &'a Element, key: &str) -> Option<&'a str> {
    item.items("tagSet").find(|tag| tag.text("key") == Some(key))?.text("value")
}

/// A point in time as EC2 writes it, in seconds since 1970.
fn unix_s(text: &str) -> Option<u64> {
    Some(parse_time(text).ok()? / 1000)
}

fn state(name: &str) -> InstanceState {
    match name {
        "pending" => InstanceState::Pending,
        "running" => InstanceState::Running,
        "shutting-down" => InstanceState::Ending,
        "terminated" => InstanceState::Gone,
        // One that stops or is stopped does not end by itself, and its disk costs money.
        _ => InstanceState::Unknown,
    }
}

/// A kind of machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// Its name.
    pub name: String,
    /// Its CPUs.
    pub cpus: u32,
    /// Its memory.
    pub memory_bytes: u64,
    /// Can VMs on it use KVM?
    pub kvm: Option<bool>,
    /// Can it be had as a spot instance?
    pub spot: bool,
    /// And not as one?
    pub on_demand: bool,
}

/// The kinds in an answer to `DescribeInstanceTypes` that run programs for x86-64.
pub fn kinds(answer: &Element) -> Vec<Kind> {
    answer.items("instanceTypeSet").filter_map(kind).collect()
}

fn kind(item: &Element) -> Option<Kind> {
    let processor = item.at("processorInfo");
    let is_ours = |processor: &Element| {
        processor.texts("supportedArchitectures").any(|name| name == "x86_64")
    };
    if !processor.is_some_and(is_ours) {
        return None;
    }
    let is_metal = item.text("bareMetal") == Some("true");
    let nests = processor.map(|processor| {
        processor.texts("supportedFeatures").any(|name| name == "nested-virtualization")
    });
    let has_class = |class: &str| item.texts("supportedUsageClasses").any(|name| name == class);
    let cpus = item.number("vCpuInfo/defaultVCpus")?.try_into().ok()?;
    let memory_bytes = item.number("memoryInfo/sizeInMiB")?.checked_mul(1 << 20)?;
    is_machine(cpus, memory_bytes).then_some(())?;
    Some(Kind {
        name: item.text("instanceType")?.to_owned(),
        cpus,
        memory_bytes,
        kvm: if is_metal { Some(true) } else { nests },
        spot: has_class("spot"),
        on_demand: has_class("on-demand"),
    })
}

/// Kind and zone of each pair in an answer to `DescribeInstanceTypeOfferings`.
pub fn places(answer: &Element) -> impl Iterator<Item = (String, String)> {
    answer.items("instanceTypeOfferingSet").filter_map(|item| {
        Some((item.text("instanceType")?.to_owned(), item.text("location")?.to_owned()))
    })
}

/// What a spot instance costs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpotPrice {
    /// As in [`Kind::name`].
    pub kind: String,
    /// The zone.
    pub zone: String,
    /// Millionths of a dollar for an hour; `None` if that is not known.
    pub per_hour_micros: Option<NonZeroU64>,
    /// Since when, in seconds since 1970.
    pub as_of_unix_s: u64,
}

/// The prices in an answer to `DescribeSpotPriceHistory`. One without a time is left out: nobody knows how old it is.
pub fn spot_prices(answer: &Element) -> impl Iterator<Item = SpotPrice> {
    answer.items("spotPriceHistorySet").filter_map(|item| {
        Some(SpotPrice {
            kind: item.text("instanceType")?.to_owned(),
            zone: item.text("availabilityZone")?.to_owned(),
            per_hour_micros: item.text("spotPrice").and_then(micros),
            as_of_unix_s: item.text("timestamp").and_then(unix_s)?,
        })
    })
}

/// Millionths of a price, rounded up. EC2 may write more than six decimals.
fn micros(text: &str) -> Option<NonZeroU64> {
    let end = text.find('.').map_or(text.len(), |point| text.len().min(point + 7));
    let (shown, rest) = (text.get(..end)?, text.get(end..)?);
    if !rest.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let more = u64::from(rest.bytes().any(|byte| byte != b'0'));
    NonZeroU64::new(shown.parse::<Money>().ok()?.micros.saturating_add(more))
}

/// The notices in an answer to `DescribeSpotInstanceRequests`. An instance that was marked nobody knows when goes now.
///
/// # Errors
/// Why it is not known which instances go.
pub fn notices(answer: &Element, now_unix_s: u64) -> Result<Vec<Notice>, String> {
    let marked = answer.items("spotInstanceRequestSet");
    let marked = marked.filter(|request| request.text("status/code") == Some(MARKED));
    let notice = |request: &Element| {
        let since = request.text("status/updateTime").and_then(unix_s);
        let instance = request.text("instanceId");
        Ok(Notice {
            instance: instance.ok_or("EC2 marks an instance without its id")?.to_owned(),
            ends_unix_s: since.map_or(now_unix_s, |since| since.saturating_add(NOTICE_S)),
        })
    };
    marked.map(notice).collect()
}

/// The name of the root disk in an answer to `DescribeImages`.
pub fn root_device(answer: &Element) -> Option<&str> {
    answer.items("imagesSet").find_map(|image| image.text("rootDeviceName"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INSTANCES: &str = "<DescribeInstancesResponse><reservationSet><item><instancesSet>\
        <item><instanceId>i-1</instanceId><instanceState><code>16</code><name>running</name></instanceState>\
        <instanceType>c8i.large</instanceType><launchTime>2026-11-29T12:00:00.000Z</launchTime>\
        <placement><availabilityZone>eu-central-1a</availabilityZone></placement><privateIpAddress>10.0.0.4</privateIpAddress>\
        <instanceLifecycle>spot</instanceLifecycle><tagSet><item><key>perigee-cluster</key><value>c1</value></item>\
        <item><key>perigee-rental</key><value>r1</value></item></tagSet></item>\
        <item><instanceId>i-2</instanceId><instanceState><name>odd</name></instanceState>\
        <tagSet><item><key>perigee-cluster</key><value>c1</value></item></tagSet></item>\
        <item><instanceId>i-3</instanceId><tagSet><item><key>perigee-cluster</key><value>c2</value></item></tagSet></item>\
        <item><tagSet><item><key>perigee-cluster</key><value>c1</value></item></tagSet></item>\
        </instancesSet></item></reservationSet></DescribeInstancesResponse>";

    const KINDS: &str = "<R><instanceTypeSet><item><instanceType>c8i.large</instanceType><bareMetal>false</bareMetal>\
        <supportedUsageClasses><item>on-demand</item><item>spot</item></supportedUsageClasses>\
        <processorInfo><supportedArchitectures><item>x86_64</item></supportedArchitectures>\
        <supportedFeatures><item>nested-virtualization</item></supportedFeatures></processorInfo>\
        <vCpuInfo><defaultVCpus>2</defaultVCpus></vCpuInfo><memoryInfo><sizeInMiB>4096</sizeInMiB></memoryInfo></item>\
        <item><instanceType>m5.metal</instanceType><bareMetal>true</bareMetal>\
        <supportedUsageClasses><item>on-demand</item></supportedUsageClasses>\
        <processorInfo><supportedArchitectures><item>x86_64</item></supportedArchitectures></processorInfo>\
        <vCpuInfo><defaultVCpus>96</defaultVCpus></vCpuInfo><memoryInfo><sizeInMiB>393216</sizeInMiB></memoryInfo></item>\
        <item><instanceType>m7g.large</instanceType>\
        <processorInfo><supportedArchitectures><item>arm64</item></supportedArchitectures></processorInfo>\
        <vCpuInfo><defaultVCpus>2</defaultVCpus></vCpuInfo><memoryInfo><sizeInMiB>8192</sizeInMiB></memoryInfo></item>\
        </instanceTypeSet></R>";

    const MARKS: &str = "<R><spotInstanceRequestSet>\
        <item><instanceId>i-1</instanceId><status><code>marked-for-termination</code>\
        <updateTime>2015-08-30T12:36:00.000Z</updateTime></status></item>\
        <item><instanceId>i-2</instanceId><status><code>fulfilled</code><updateTime>2015-08-30T12:36:00Z</updateTime></status></item>\
        </spotInstanceRequestSet></R>";

    fn tree(text: &str) -> Element {
        Element::parse(text.as_bytes()).expect("a document")
    }

    #[test]
    fn instances_of_the_cluster_are_read() {
        let instances = instances(&tree(INSTANCES), "c1");
        assert_eq!(instances.len(), 2, "{instances:?}");
        let first = Instance {
            id: "i-1".to_owned(),
            rental: Some("r1".to_owned()),
            state: InstanceState::Running,
            kind: "c8i.large".to_owned(),
            zone: "eu-central-1a".to_owned(),
            spot: true,
            address: Some("10.0.0.4".to_owned()),
            started_unix_s: Some(1_795_953_600),
        };
        assert_eq!(instances[0], first);
        assert_eq!((instances[1].state, &instances[1].rental), (InstanceState::Unknown, &None));
    }

    #[test]
    fn kinds_say_whether_they_nest_kvm() {
        let kinds = kinds(&tree(KINDS));
        let read: Vec<_> = kinds.iter().map(|k| (k.name.as_str(), k.kvm, k.cpus, k.spot)).collect();
        assert_eq!(read, [("c8i.large", Some(true), 2, true), ("m5.metal", Some(true), 96, false)]);
        assert_eq!(kinds[0].memory_bytes, 4 << 30);
        let plain = KINDS.replace("<item>nested-virtualization</item>", "<item>amd-sev-snp</item>");
        assert_eq!(super::kinds(&tree(&plain))[0].kvm, Some(false));
    }

    #[test]
    fn a_kind_without_cpus_or_memory_is_left_out() {
        for (number, none) in [("Cpus>2<", "Cpus>0<"), ("InMiB>4096<", "InMiB>0<")] {
            let wrong = KINDS.replace(number, none);
            assert_ne!(wrong, KINDS);
            let read: Vec<String> =
                kinds(&tree(&wrong)).into_iter().map(|kind| kind.name).collect();
            assert_eq!(read, ["m5.metal"], "{none}");
        }
    }

    #[test]
    fn prices_are_rounded_up_and_0_is_not_known() {
        for (text, expected) in [
            ("0.0345", 34_500),
            ("0.00001", 10),
            ("1", 1_000_000),
            ("0.1234560001", 123_457),
            ("0.1234560000", 123_456),
            ("0.0000000", 0),
            ("0", 0),
            ("-1", 0),
            ("0.1234567e", 0),
            ("", 0),
        ] {
            assert_eq!(micros(text), NonZeroU64::new(expected), "{text}");
        }
    }

    #[test]
    fn a_marked_instance_goes_two_minutes_after_its_mark() {
        let notice = Notice { instance: "i-1".to_owned(), ends_unix_s: 1_440_938_160 + 120 };
        assert_eq!(notices(&tree(MARKS), 7), Ok(vec![notice]));
    }

    #[test]
    fn a_mark_without_a_time_counts_now_and_one_without_an_instance_is_not_passed_over() {
        let at_some_time = MARKS.replace("2015-08-30T12:36:00.000Z", "soon");
        let notice = Notice { instance: "i-1".to_owned(), ends_unix_s: 7 };
        assert_eq!(notices(&tree(&at_some_time), 7), Ok(vec![notice]));
        let of_nobody = MARKS.replace("<instanceId>i-1</instanceId>", "");
        assert!(notices(&tree(&of_nobody), 7).is_err());
    }

    #[test]
    fn only_what_is_on_its_way_out_ends() {
        for (name, expected) in [
            ("shutting-down", InstanceState::Ending),
            ("terminated", InstanceState::Gone),
            ("stopping", InstanceState::Unknown),
            ("stopped", InstanceState::Unknown),
            ("", InstanceState::Unknown),
        ] {
            assert_eq!(state(name), expected, "{name}");
        }
    }

    fn read_all(bytes: &[u8]) -> usize {
        let Ok(tree) = Element::parse(bytes) else { return 0 };
        instances(&tree, "c1").len()
            + made(&tree).len()
            + kinds(&tree).len()
            + places(&tree).count()
            + spot_prices(&tree).count()
            + notices(&tree, 7).map_or(0, |notices| notices.len())
            + usize::from(root_device(&tree).is_some())
    }

    /// What is cut is no document: no list is taken for a whole one that is half of one.
    #[test]
    fn a_cut_answer_is_refused() {
        for text in [INSTANCES, KINDS, MARKS] {
            assert!(read_all(text.as_bytes()) > 0, "a whole one is read");
            for end in 0..text.len() {
                assert!(Element::parse(&text.as_bytes()[..end]).is_err(), "{end}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_damaged_answer_ends_in_no_panic(
            which in 0..3_usize,
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        ) {
            let mut bytes = [INSTANCES, KINDS, MARKS][which].as_bytes().to_vec();
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            read_all(&bytes);
            super::super::errors::of("can't", 400, &bytes);
        }

        #[test]
        fn times_and_prices_of_any_text_end_in_no_panic(text in "\\PC{0,30}") {
            unix_s(&text);
            micros(&text);
        }
    }
}
