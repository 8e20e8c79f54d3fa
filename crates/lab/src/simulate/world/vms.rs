//! The VMs by their numbers. A VM that has ended for good is forgotten, and its number is never given again.

use std::collections::{BTreeSet, HashMap};
use std::ops::{Index, IndexMut};

use perigee_model::VmId;

use super::Vm;

/// All VMs that have come or will come, but for those that have ended.
#[derive(Default)]
pub(super) struct Vms {
    all: Vec<Option<Box<Vm>>>,
    /// The numbers of those that are not forgotten: of a log's jobs nearly all are, most of the time.
    there: BTreeSet<usize>,
    numbers: HashMap<VmId, usize>,
    /// Forgotten since this was last asked for.
    gone: Vec<VmId>,
}

impl Vms {
    /// The number of the VM that is added next.
    pub(super) fn next(&self) -> usize {
        self.all.len()
    }

    pub(super) fn add(&mut self, vm: Vm) {
        let number = self.next();
        self.numbers.insert(vm.id.clone(), number);
        self.there.insert(number);
        self.all.push(Some(Box::new(vm)));
    }

    /// `None` if the VM is forgotten.
    pub(super) fn number(&self, id: &VmId) -> Option<usize> {
        self.numbers.get(id).copied()
    }

    pub(super) fn has(&self, number: usize) -> bool {
        self.all.get(number).is_some_and(Option::is_some)
    }

    /// The VM is at no host, waits for none, and sends nothing.
    pub(super) fn forget(&mut self, number: usize) {
        if let Some(vm) = self.all.get_mut(number).and_then(Option::take) {
            self.numbers.remove(&vm.id);
            self.there.remove(&number);
            self.gone.push(vm.id);
        }
    }

    /// The VMs that were forgotten since the last call.
    pub(super) fn take_gone(&mut self) -> Vec<VmId> {
        std::mem::take(&mut self.gone)
    }

    /// In the order of their numbers.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Vm)> {
        self.there.iter().map(|number| (*number, &self[*number]))
    }

    /// Does this with each of them.
    pub(super) fn each(&mut self, mut change: impl FnMut(&mut Vm)) {
        for number in &self.there {
            if let Some(vm) = self.all[*number].as_deref_mut() {
                change(vm);
            }
        }
    }
}

impl Index<usize> for Vms {
    type Output = Vm;

    fn index(&self, number: usize) -> &Vm {
        self.all[number].as_deref().expect("a VM that has not ended")
    }
}

impl IndexMut<usize> for Vms {
    fn index_mut(&mut self, number: usize) -> &mut Vm {
        self.all[number].as_deref_mut().expect("a VM that has not ended")
    }
}
