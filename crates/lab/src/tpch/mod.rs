//! TPC-H: the tables, the queries with their validation parameters, and answers that SQLite computes
//! with integers, independently of PostgreSQL.

mod oracle;
mod queries;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use perigee_model::Problem;
use tpchgen::generators::{LineItemGenerator, OrderGenerator, PartGenerator};

pub use oracle::{Answer, NULL, compare, expected, parse, sqlite_version};
pub use queries::{DEMO_QUERIES, LOADED_SQL, QUERIES, Query};

/// A table that the queries read, with the types of the specification.
pub struct Table {
    pub name: &'static str,
    pub create_sql: &'static str,
}

/// The tables that the queries use.
pub const TABLES: [Table; 3] = [
    Table {
        name: "part",
        create_sql: "\
create table part (
  p_partkey integer not null, p_name varchar(55) not null, p_mfgr char(25) not null,
  p_brand char(10) not null, p_type varchar(25) not null, p_size integer not null,
  p_container char(10) not null, p_retailprice decimal(15,2) not null, p_comment varchar(23) not null);
",
    },
    Table {
        name: "orders",
        create_sql: "\
create table orders (
  o_orderkey integer not null, o_custkey integer not null, o_orderstatus char(1) not null,
  o_totalprice decimal(15,2) not null, o_orderdate date not null, o_orderpriority char(15) not null,
  o_clerk char(15) not null, o_shippriority integer not null, o_comment varchar(79) not null);
",
    },
    Table {
        name: "lineitem",
        create_sql: "\
create table lineitem (
  l_orderkey integer not null, l_partkey integer not null, l_suppkey integer not null,
  l_linenumber integer not null, l_quantity decimal(15,2) not null,
  l_extendedprice decimal(15,2) not null, l_discount decimal(15,2) not null,
  l_tax decimal(15,2) not null, l_returnflag char(1) not null, l_linestatus char(1) not null,
  l_shipdate date not null, l_commitdate date not null, l_receiptdate date not null,
  l_shipinstruct char(25) not null, l_shipmode char(10) not null, l_comment varchar(44) not null);
",
    },
];

/// The file of a table. Each line is a row; `|` separates the columns and does not end the last one.
pub fn table_path(dir: &Path, table: &str) -> PathBuf {
    dir.join(format!("{table}.tbl"))
}

/// Writes the tables below a directory, and returns their size in bytes.
///
/// # Errors
/// `Invalid` for a scale factor that makes no rows or too many, `Internal` when a write fails.
pub fn write_tables(scale_factor: f64, dir: &Path) -> Result<u64, Problem> {
    if !(0.001..=10.0).contains(&scale_factor) {
        return Err(Problem::invalid(
            format!("can't make tables with scale factor {scale_factor}"),
            "it must be from 0.001 to 10",
        ));
    }
    let lineitem = LineItemGenerator::new(scale_factor, 1, 1);
    let orders = OrderGenerator::new(scale_factor, 1, 1);
    let part = PartGenerator::new(scale_factor, 1, 1);
    Ok(write_table(&table_path(dir, "lineitem"), lineitem.iter())?
        + write_table(&table_path(dir, "orders"), orders.iter())?
        + write_table(&table_path(dir, "part"), part.iter())?)
}

/// Writes rows of the generator to a file, and returns its size in bytes.
///
/// # Errors
/// `Internal` when a write fails.
pub fn write_table<R: std::fmt::Display>(
    path: &Path,
    rows: impl Iterator<Item = R>,
) -> Result<u64, Problem> {
    let fail = |e: std::io::Error| Problem::internal(format!("can't write {}", path.display()), e);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(fail)?);
    let mut line = String::new();
    let mut bytes = 0;
    for row in rows {
        use std::fmt::Write as _;
        line.clear();
        // Writing to a String cannot fail.
        let _ = write!(line, "{row}");
        // The generator ends each row with a separator, after which COPY would expect another column.
        let text = line.strip_suffix('|').unwrap_or(&line);
        file.write_all(text.as_bytes()).map_err(fail)?;
        file.write_all(b"\n").map_err(fail)?;
        bytes += text.len() as u64 + 1;
    }
    file.flush().map_err(fail)?;
    Ok(bytes)
}
