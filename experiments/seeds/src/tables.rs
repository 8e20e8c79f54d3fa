//! TPC-H's eight tables, and what its refresh functions bring and take away, as files for `experiments/workloads/tpch`.

use std::path::Path;

use anyhow::{Result, ensure};
use perigee_lab::tpch::{table_path, write_table};
use tpchgen::generators::{
    CustomerGenerator, LineItemGenerator, NationGenerator, OrderGenerator, PartGenerator,
    PartSuppGenerator, RegionGenerator, SupplierGenerator,
};

/// A refresh function has 1,500 orders by scale factor, of 1,500,000.
const REFRESHED: i64 = 1000;
/// Of each 32 keys of orders only the first eight are used (clause 1.4.2): this is the first one of the next eight.
const UNUSED: i64 = 8;

/// Whether a new order is made after the one with this key: every thousandth, from the 500th on. The key has two bits of zeros above
/// its last three.
fn is_new(key: i64) -> bool {
    order_number(key) % REFRESHED == REFRESHED / 2
}

/// Whether the second refresh function takes the order away.
fn is_old(key: i64) -> bool {
    order_number(key) % REFRESHED == 1
}

fn order_number(key: i64) -> i64 {
    (key >> 5 << 3) | (key & 7)
}

/// Writes the files, and returns the size of the tables in bytes.
///
/// # Errors
/// The scale factor is out of range, or a write fails.
pub fn write(scale_factor: f64, dir: &Path) -> Result<u64> {
    // With fewer than 100 suppliers a part has the same one twice.
    ensure!((0.01..=10.0).contains(&scale_factor), "the scale factor must be from 0.01 to 10");
    std::fs::create_dir_all(dir)?;
    let path = |table: &str| table_path(dir, table);
    let orders = || OrderGenerator::new(scale_factor, 1, 1).into_iter();
    let lines = || LineItemGenerator::new(scale_factor, 1, 1).into_iter();
    let sizes = [
        write_table(&path("region"), RegionGenerator::new(scale_factor, 1, 1).into_iter())?,
        write_table(&path("nation"), NationGenerator::new(scale_factor, 1, 1).into_iter())?,
        write_table(&path("part"), PartGenerator::new(scale_factor, 1, 1).into_iter())?,
        write_table(&path("supplier"), SupplierGenerator::new(scale_factor, 1, 1).into_iter())?,
        write_table(&path("partsupp"), PartSuppGenerator::new(scale_factor, 1, 1).into_iter())?,
        write_table(&path("customer"), CustomerGenerator::new(scale_factor, 1, 1).into_iter())?,
        write_table(&path("orders"), orders())?,
        write_table(&path("lineitem"), lines())?,
    ];
    let new_orders = orders().filter(|order| is_new(order.o_orderkey)).map(|mut order| {
        order.o_orderkey += UNUSED;
        order
    });
    write_table(&path("new_orders"), new_orders)?;
    let new_lines = lines().filter(|line| is_new(line.l_orderkey)).map(|mut line| {
        line.l_orderkey += UNUSED;
        line
    });
    write_table(&path("new_lineitem"), new_lines)?;
    let old_orders = orders().map(|order| order.o_orderkey).filter(|key| is_old(*key));
    write_table(&path("old_orders"), old_orders)?;
    Ok(sizes.iter().sum())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn keys(dir: &Path, table: &str) -> Vec<i64> {
        let text = std::fs::read_to_string(table_path(dir, table)).expect("a table");
        let first = |line: &str| line.split('|').next().and_then(|key| key.parse().ok());
        text.lines().map(|line| first(line).expect("a key")).collect()
    }

    #[test]
    fn new_orders_have_unused_keys_and_lines_and_old_ones_are_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let bytes = write(0.01, dir.path()).expect("tables");
        assert!(bytes > 9_000_000, "{bytes}");
        let there: BTreeSet<i64> = keys(dir.path(), "orders").into_iter().collect();
        assert_eq!(there.len(), 15_000);
        let new: BTreeSet<i64> = keys(dir.path(), "new_orders").into_iter().collect();
        let old: BTreeSet<i64> = keys(dir.path(), "old_orders").into_iter().collect();
        assert_eq!((new.len(), old.len()), (15, 15));
        assert!(new.is_disjoint(&there));
        assert!(old.is_subset(&there));
        let lines: BTreeSet<i64> = keys(dir.path(), "new_lineitem").into_iter().collect();
        assert_eq!(lines, new, "each new order has lines");
    }
}
