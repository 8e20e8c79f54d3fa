//! The durable map through torn pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use perigee_model::LayerId;
use proptest::prelude::*;
use uuid::Uuid;

use crate::disk::blocks::{BlockState, BlockStates, PAGE_STATE_BYTES};
use crate::disk::files::BlockFile;
use crate::disk::map::{MapError, MapFile, PAGE_BYTES, StoreError, file_bytes};
use crate::sim::{Dice, SimFile};

const LAYER: LayerId = LayerId(Uuid::from_u128(7));
/// Three pages of states, the last one not full.
const BLOCKS: u64 = 2 * 16256 + 1000;

fn create() -> (Arc<SimFile>, MapFile) {
    let file = Arc::new(SimFile::alone(file_bytes(BLOCKS)));
    let map = MapFile::create(Arc::clone(&file) as _, LAYER, &BlockStates::new(BLOCKS)).unwrap();
    (file, map)
}

fn load(file: &Arc<SimFile>) -> Result<(MapFile, BlockStates), MapError> {
    MapFile::load(Arc::clone(file) as _, LAYER, BLOCKS)
}

fn page(states: &BlockStates, page: usize) -> (usize, Vec<u8>) {
    (page, states.payload(page))
}

fn slot(page: usize, slot: usize) -> u64 {
    (PAGE_BYTES * (1 + 2 * page + slot)) as u64
}

#[test]
fn a_torn_page_costs_nothing_that_was_flushed() {
    let (file, mut map) = create();
    let states = BlockStates::new(BLOCKS);
    states.set(3..9, BlockState::Data);
    map.store(&[page(&states, 0)]).unwrap();
    // The next store of page 0 goes into its other slot and is torn.
    file.write_at(slot(0, 0) + 512, &[0xff; 512]).unwrap();
    assert_eq!(load(&file).unwrap().1, states);
}

#[test]
fn a_first_store_that_was_torn_leaves_the_page_absent() {
    let (file, _) = create();
    file.write_at(slot(1, 1), &[1; 512]).unwrap();
    assert_eq!(load(&file).unwrap().1, BlockStates::new(BLOCKS));
}

#[test]
fn a_page_damaged_in_both_slots_is_an_error_and_no_guess() {
    let (file, mut map) = create();
    let states = BlockStates::new(BLOCKS);
    states.set(0..1, BlockState::Data);
    map.store(&[page(&states, 0)]).unwrap();
    map.store(&[page(&states, 0)]).unwrap();
    for damaged in 0..2 {
        file.write_at(slot(0, damaged) + 100, &[0xee; 8]).unwrap();
    }
    assert!(matches!(load(&file), Err(MapError::Page(0))));
}

#[test]
fn a_map_of_another_layer_is_refused() {
    let (file, _) = create();
    let other = LayerId(Uuid::from_u128(8));
    let refused = MapFile::load(Arc::clone(&file) as _, other, BLOCKS);
    assert!(matches!(refused, Err(MapError::Header)));
    let larger = MapFile::load(file as _, LAYER, BLOCKS + 1);
    assert!(matches!(larger, Err(MapError::Header)));
}

#[test]
fn a_store_that_found_no_space_may_be_repeated() {
    let (file, mut map) = create();
    let states = BlockStates::new(BLOCKS);
    states.set(0..16256, BlockState::Data);
    map.store(&[page(&states, 0)]).unwrap();
    let flushed = BlockStates::new(BLOCKS);
    flushed.set(0..16256, BlockState::Data);
    states.set(0..16256, BlockState::Zero);
    file.full.store(true, std::sync::atomic::Ordering::SeqCst);
    let failed = map.store(&[page(&states, 0)]);
    assert!(matches!(failed, Err(StoreError::Write(_))));
    assert_eq!(load(&file).unwrap().1, flushed, "the current slot was not touched");
    file.full.store(false, std::sync::atomic::Ordering::SeqCst);
    map.store(&[page(&states, 0)]).unwrap();
    assert_eq!(load(&file).unwrap().1, states);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 128, ..ProptestConfig::default() })]

    /// Stores, some of them cut off by a power cut before the sync: each page then is as the last
    /// good store left it, or as one of the stores after it.
    #[test]
    fn every_page_is_as_flushed_or_newer(
        rounds in prop::collection::vec((any::<u8>(), 1_u8..8, any::<bool>()), 1..20),
        seed in any::<u64>(),
    ) {
        let (file, mut map) = create();
        let mut dice = Dice(seed);
        let mut current: BTreeMap<usize, Vec<u8>> = BTreeMap::new();
        let states = BlockStates::new(BLOCKS);
        for number in 0..3 {
            current.insert(number, page(&states, number).1);
        }
        for (value, pages, cut) in rounds {
            let stored: Vec<_> = (0..3)
                .filter(|number| pages & 1 << number != 0)
                .map(|number| {
                    // Valid states only, and none beyond the last block.
                    let used_bytes = if number < 2 { PAGE_STATE_BYTES } else { 250 };
                    let mut payload = vec![0; PAGE_STATE_BYTES];
                    payload[..used_bytes].fill(value & 0x55);
                    (number, payload)
                })
                .collect();
            file.fail_sync.store(cut, std::sync::atomic::Ordering::SeqCst);
            let result = map.store(&stored);
            prop_assert_eq!(result.is_err(), cut);
            if cut {
                file.power_cut(&mut dice);
            }
            let (loaded_map, loaded) = load(&file).unwrap();
            map = loaded_map;
            for (number, old) in &mut current {
                let now = page(&loaded, *number).1;
                let new = stored.iter().find(|(stored, _)| stored == number).map(|(_, new)| new);
                prop_assert!(now == *old && (cut || new.is_none()) || Some(&now) == new);
                *old = now;
            }
        }
    }
}

#[test]
fn a_page_holds_what_the_format_says() {
    assert_eq!(PAGE_STATE_BYTES * 4, 16256);
}
