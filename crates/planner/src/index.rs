//! Lists of a snapshot in which hosts and links are found without a walk: with 10,000 hosts a walk for each pair of them takes seconds.
//!
//! An index is built when something is first looked up. Whoever may change a list drops its index. Copies share the list until one of them is
//! changed: the facts of many running VMs are mostly the same.

use std::collections::{HashMap, HashSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use perigee_model::vm::Accelerator;
use perigee_model::{HostId, SiteId};

use crate::facts::{HostFacts, LinkFacts};
use crate::hosts::Booted;

/// What an [`Indexed`] list is made of.
pub trait Listed: Sized {
    /// What is known of the whole list.
    type Index;

    /// The index of the list.
    fn index(list: &[Self]) -> Self::Index;
}

/// A list that is used as a `Vec`, with its index.
pub struct Indexed<T: Listed> {
    list: Arc<Vec<T>>,
    index: OnceLock<Arc<T::Index>>,
}

impl<T: Listed> Indexed<T> {
    /// Built at the first call after a change.
    pub(crate) fn index(&self) -> &T::Index {
        self.index.get_or_init(|| Arc::new(T::index(&self.list)))
    }
}

impl<T: Listed + Clone> Indexed<T> {
    /// To change what is not in the index, which is kept.
    pub(crate) fn beside_index(&mut self) -> &mut [T] {
        let list: &mut Vec<T> = Arc::make_mut(&mut self.list);
        list
    }
}

impl<T: Listed> Deref for Indexed<T> {
    type Target = Vec<T>;

    fn deref(&self) -> &Vec<T> {
        &self.list
    }
}

impl<T: Listed + Clone> DerefMut for Indexed<T> {
    fn deref_mut(&mut self) -> &mut Vec<T> {
        self.index.take();
        Arc::make_mut(&mut self.list)
    }
}

impl<T: Listed> From<Vec<T>> for Indexed<T> {
    fn from(list: Vec<T>) -> Self {
        Self { list: Arc::new(list), index: OnceLock::new() }
    }
}

impl<T: Listed> FromIterator<T> for Indexed<T> {
    fn from_iter<I: IntoIterator<Item = T>>(all: I) -> Self {
        Vec::from_iter(all).into()
    }
}

impl<T: Listed> Default for Indexed<T> {
    fn default() -> Self {
        Vec::new().into()
    }
}

impl<T: Listed> Clone for Indexed<T> {
    fn clone(&self) -> Self {
        Self { list: Arc::clone(&self.list), index: self.index.clone() }
    }
}

impl<T: Listed + std::fmt::Debug> std::fmt::Debug for Indexed<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(&self.list, f)
    }
}

impl<'a, T: Listed> IntoIterator for &'a Indexed<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}

impl<'a, T: Listed + Clone> IntoIterator for &'a mut Indexed<T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        DerefMut::deref_mut(self).iter_mut()
    }
}

/// Of the hosts' names, sites, processors and boots. A host's number is its place in the list.
#[derive(Debug)]
pub struct HostIndex {
    numbers: HashMap<HostId, usize>,
    /// Of each host, the number of its site, and of all hosts with its processor.
    kinds: Vec<Kind>,
    pub(crate) booted: Booted,
}

/// Hosts of one kind are at one site and have the same processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub site: usize,
    pub processor: usize,
}

impl HostIndex {
    pub(crate) fn number(&self, host: &HostId) -> Option<usize> {
        self.numbers.get(host).copied()
    }

    pub(crate) fn kind(&self, number: usize) -> Kind {
        self.kinds[number]
    }
}

impl Listed for HostFacts {
    type Index = HostIndex;

    fn index(hosts: &[Self]) -> HostIndex {
        let mut numbers = HashMap::with_capacity(hosts.len());
        let mut sites: HashMap<&SiteId, usize> = HashMap::new();
        let mut processors: HashMap<(bool, &str), usize> = HashMap::new();
        let mut kinds = Vec::with_capacity(hosts.len());
        for (number, host) in hosts.iter().enumerate() {
            numbers.entry(host.id.clone()).or_insert(number);
            let next = sites.len();
            let site = *sites.entry(&host.site).or_insert(next);
            let next = processors.len();
            let processor = (host.accelerator == Accelerator::Kvm, host.cpu_model.as_str());
            let processor = *processors.entry(processor).or_insert(next);
            kinds.push(Kind { site, processor });
        }
        let processors: Vec<usize> = kinds.iter().map(|kind| kind.processor).collect();
        HostIndex { numbers, kinds, booted: Booted::of(hosts, &processors) }
    }
}

/// Of the links that are measured.
#[derive(Debug)]
pub struct LinkIndex {
    by_hosts: HashMap<HostId, HashMap<HostId, usize>>,
    by_sites: HashMap<SiteId, HashMap<SiteId, usize>>,
    /// Hosts with a link that counts for them and not for their sites.
    apart: HashSet<HostId>,
}

impl LinkIndex {
    /// The link between these very hosts.
    pub(crate) fn between_hosts(&self, from: &HostId, to: &HostId) -> Option<usize> {
        self.by_hosts.get(from)?.get(to).copied()
    }

    /// The link that counts for all hosts of these sites.
    pub(crate) fn between_sites(&self, from: &SiteId, to: &SiteId) -> Option<usize> {
        self.by_sites.get(from)?.get(to).copied()
    }

    /// The hosts that may be linked otherwise than others of their sites.
    pub(crate) fn apart(&self) -> impl Iterator<Item = &HostId> {
        self.apart.iter()
    }
}

impl Listed for LinkFacts {
    type Index = LinkIndex;

    /// Of several links between the same hosts or sites the first one counts.
    fn index(links: &[Self]) -> LinkIndex {
        let mut by_hosts: HashMap<HostId, HashMap<HostId, usize>> = HashMap::new();
        let mut by_sites: HashMap<SiteId, HashMap<SiteId, usize>> = HashMap::new();
        let mut apart = HashSet::new();
        let measured = links.iter().enumerate().filter(|(_, link)| link.is_measured());
        for (number, link) in measured {
            let of_hosts = by_hosts.entry(link.from.clone()).or_default();
            of_hosts.entry(link.to.clone()).or_insert(number);
            let of_sites = by_sites.entry(link.from_site.clone()).or_default();
            if *of_sites.entry(link.to_site.clone()).or_insert(number) != number {
                apart.extend([link.from.clone(), link.to.clone()]);
            }
        }
        LinkIndex { by_hosts, by_sites, apart }
    }
}
