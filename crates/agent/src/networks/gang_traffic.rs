//! What the VMs of a job send to each other, counted for each pair by the packet filter of the sender's host.
//!
//! The table has one set with an element for each pair, and the kernel counts at the element: a frame costs one lookup. Only frames that
//! `rules.rs` has let pass are counted, so no VM counts for another one. Only pairs of a job's VMs are in the set: a guest
//! that sends to many addresses fills nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::Ipv4Addr;

use perigee_model::VmId;
use perigee_model::gang::of_member;
use perigee_model::network::HostNetwork;
use serde_json::Value;

use super::CardHere;
use super::names::Tag;
use super::tools::run;

/// As many pairs are counted at a host. A job of 64 VMs has 4032.
const PAIRS_MAX: usize = 32_768;

/// A card here, and the address to which it sends.
pub type Pair = (String, Ipv4Addr);

/// Whose pair it is.
pub type Pairs = BTreeMap<Pair, (VmId, VmId)>;

/// Bytes by sender and receiver.
pub type Sent = BTreeMap<VmId, BTreeMap<VmId, u64>>;

/// All pairs whose sender has a card here.
pub fn pairs(tag: &Tag, networks: &[HostNetwork], cards: &BTreeMap<VmId, CardHere>) -> Pairs {
    let mut pairs = Pairs::new();
    for (vm, CardHere { card, .. }) in cards {
        let Some((gang, _)) = of_member(vm.as_str()) else { continue };
        let network = networks.iter().find(|n| n.vni == card.vni && n.name == card.network);
        let Some(network) = network else { continue };
        let name = tag.tap(card);
        for other in network.members.iter().filter(|other| other.vm != *vm) {
            if of_member(other.vm.as_str()).is_some_and(|(of, _)| of == gang)
                && pairs.len() < PAIRS_MAX
            {
                pairs.insert((name.clone(), other.address), (vm.clone(), other.vm.clone()));
            }
        }
    }
    pairs
}

/// The table with its set, as `nft` reads it. What is counted already stays.
pub fn table(tag: &Tag) -> String {
    let table = format!("bridge {}", tag.talk());
    // Behind the filter of what a card may send, which comes at -300.
    format!(
        "table {table} {{
  set pairs {{ type ifname . ipv4_addr; size 65535; counter; }}
  chain come {{ type filter hook prerouting priority -290; policy accept; }}
}}
flush chain {table} come
table {table} {{
  chain come {{
    ether type ip iifname . ip daddr @pairs accept
  }}
}}
"
    )
}

/// Removes the table, also where there is none.
pub fn none(tag: &Tag) -> String {
    let table = format!("bridge {}", tag.talk());
    format!("table {table}\ndelete table {table}\n")
}

/// What changes the pairs that are counted.
fn changes(tag: &Tag, there: &BTreeSet<&Pair>, wanted: &Pairs) -> String {
    let mut text = String::new();
    let list = |pairs: Vec<&Pair>| {
        let each: Vec<String> = pairs.iter().map(|(tap, to)| format!("\"{tap}\" . {to}")).collect();
        each.join(", ")
    };
    let new: Vec<&Pair> = wanted.keys().filter(|pair| !there.contains(pair)).collect();
    let old: Vec<&Pair> =
        there.iter().copied().filter(|pair| !wanted.contains_key(*pair)).collect();
    for (word, pairs) in [("delete", old), ("add", new)] {
        if !pairs.is_empty() {
            let _ =
                writeln!(text, "{word} element bridge {} pairs {{ {} }}", tag.talk(), list(pairs));
        }
    }
    text
}

/// Has the kernel count these pairs, and reads what it has counted.
pub async fn bring_about(tag: &Tag, wanted: &Pairs) -> Result<Sent, String> {
    let ask = ["-j", "list", "set", "bridge", &tag.talk(), "pairs"];
    let listed = match run("nft", &ask, "").await {
        Ok(listed) => listed,
        Err(_) => {
            // Its chain may be there without its set: then it is somebody else's work, and is made anew.
            let made = run("nft", &["-f", "-"], &table(tag)).await;
            if made.is_err() {
                run("nft", &["-f", "-"], &(none(tag) + &table(tag))).await?;
            }
            run("nft", &ask, "").await?
        }
    };
    let counted = counted(&listed)?;
    let text = changes(tag, &counted.keys().collect(), wanted);
    if !text.is_empty() {
        run("nft", &["-f", "-"], &text).await?;
    }
    let mut sent = Sent::new();
    for (pair, (from, to)) in wanted {
        let bytes = counted.get(pair).copied().unwrap_or_default();
        sent.entry(from.clone()).or_default().insert(to.clone(), bytes);
    }
    Ok(sent)
}

/// The bytes of each pair, as `nft -j list set` says them.
fn counted(listed: &str) -> Result<BTreeMap<Pair, u64>, String> {
    let json: Value = serde_json::from_str(listed).map_err(|e| format!("nft says {e}"))?;
    let sets = json["nftables"].as_array().into_iter().flatten();
    let elements = sets.filter_map(|entry| entry["set"]["elem"].as_array()).flatten();
    let of = |element: &Value| {
        let element = &element["elem"];
        let pair = element["val"]["concat"].as_array()?;
        let (tap, to) = (pair.first()?.as_str()?, pair.get(1)?.as_str()?.parse().ok()?);
        Some(((tap.to_owned(), to), element["counter"]["bytes"].as_u64()?))
    };
    elements.map(|one| of(one).ok_or_else(|| format!("nft says of a pair {one}"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_and_only_what_differs_is_changed() {
        let listed = r#"{"nftables": [{"metainfo": {"version": "1.0.6"}}, {"set": {"family": "bridge", "name": "pairs",
            "elem": [{"elem": {"val": {"concat": ["pt1", "10.88.0.3"]}, "counter": {"packets": 2, "bytes": 168}}},
                     {"elem": {"val": {"concat": ["pt2", "10.88.0.2"]}, "counter": {"packets": 0, "bytes": 0}}}]}}]}"#;
        let counted = counted(listed).expect("pairs");
        let pair = |tap: &str, last| (tap.to_owned(), Ipv4Addr::new(10, 88, 0, last));
        assert_eq!(counted, [(pair("pt1", 3), 168), (pair("pt2", 2), 0)].into());
        let vm = |name: &str| VmId::new(name).expect("a name");
        let wanted: Pairs = [pair("pt1", 3), pair("pt1", 4)]
            .map(|pair| (pair, (vm("g-0001-n0"), vm("g-0001-n1"))))
            .into();
        let tag = Tag::new(
            &perigee_model::HostId::new("home1").expect("a name"),
            std::path::Path::new("/state"),
        );
        let text = changes(&tag, &counted.keys().collect(), &wanted);
        let set = format!("element bridge {} pairs", tag.talk());
        assert_eq!(
            text,
            format!(
                "delete {set} {{ \"pt2\" . 10.88.0.2 }}\nadd {set} {{ \"pt1\" . 10.88.0.4 }}\n"
            )
        );
        assert_eq!(changes(&tag, &wanted.keys().collect(), &wanted), "");
    }
}
