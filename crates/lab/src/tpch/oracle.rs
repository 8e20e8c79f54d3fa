//! SQLite's answers from the same table files, and the comparison with PostgreSQL's.
//!
//! SQLite has no decimals. Prices are stored in cents, discounts in per cent and quantities as
//! whole numbers, so sums are exact. Only the last division is in floating point.

use std::io::BufRead;
use std::path::Path;

use perigee_model::Problem;
use rusqlite::Connection;
use rusqlite::types::Value;

use super::queries::Query;
use super::table_path;

/// Two numbers count as equal if their relative difference is smaller than this.
const RELATIVE: f64 = 1e-9;

/// The text of a missing value, here and (by `\pset`) in psql's output.
pub const NULL: &str = "NULL";

/// A query's rows, columns separated by `|`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub query: String,
    pub rows: Vec<String>,
}

const TABLES: &str = "\
create table lineitem (l_orderkey integer, l_partkey integer, l_quantity integer,
  l_price_cents integer, l_discount_percent integer, l_shipdate text, l_commitdate text,
  l_receiptdate text, l_shipmode text);
create table orders (o_orderkey integer primary key, o_orderpriority text);
create table part (p_partkey integer primary key, p_brand text, p_type text, p_container text);";

/// The column of a table file from which a column of the database is filled, and its type.
#[derive(Clone, Copy)]
enum From {
    Text(usize),
    Whole(usize),
    /// A decimal number with two digits, times 100.
    Hundredths(usize),
}

const LINEITEM: [From; 9] = [
    From::Whole(0),
    From::Whole(1),
    From::Whole(4),
    From::Hundredths(5),
    From::Hundredths(6),
    From::Text(10),
    From::Text(11),
    From::Text(12),
    From::Text(14),
];
const ORDERS: [From; 2] = [From::Whole(0), From::Text(5)];
const PART: [From; 4] = [From::Whole(0), From::Text(3), From::Text(4), From::Text(6)];

/// Of the SQLite that computes the expected answers.
pub fn sqlite_version() -> &'static str {
    rusqlite::version()
}

/// Answers queries over the table files in a directory.
///
/// # Errors
/// `Internal` when a file cannot be read or does not have the expected format.
pub fn expected(dir: &Path, queries: &[Query]) -> Result<Vec<Answer>, Problem> {
    let mut db = Connection::open_in_memory().map_err(failed)?;
    db.execute_batch(TABLES).map_err(failed)?;
    load(&mut db, dir, "lineitem", &LINEITEM)?;
    load(&mut db, dir, "orders", &ORDERS)?;
    load(&mut db, dir, "part", &PART)?;
    db.execute_batch("create index by_part on lineitem (l_partkey); analyze").map_err(failed)?;
    queries.iter().map(|query| answer(&db, query)).collect()
}

fn failed(error: rusqlite::Error) -> Problem {
    Problem::internal("can't compute the right answers", error)
}

fn load(db: &mut Connection, dir: &Path, table: &str, columns: &[From]) -> Result<(), Problem> {
    let path = table_path(dir, table);
    let fail =
        |e: &dyn std::fmt::Display| Problem::internal(format!("can't read {}", path.display()), e);
    let file = std::fs::File::open(&path).map_err(|e| fail(&e))?;
    let marks = vec!["?"; columns.len()].join(",");
    let transaction = db.transaction().map_err(failed)?;
    {
        let insert = format!("insert into {table} values ({marks})");
        let mut insert = transaction.prepare(&insert).map_err(failed)?;
        for line in std::io::BufReader::with_capacity(1 << 20, file).lines() {
            let line = line.map_err(|e| fail(&e))?;
            let fields: Vec<&str> = line.split('|').collect();
            let row: Option<Vec<Value>> = columns.iter().map(|c| value(&fields, *c)).collect();
            let row = row.ok_or_else(|| fail(&format!("unexpected row {line:?}")))?;
            insert.execute(rusqlite::params_from_iter(row)).map_err(failed)?;
        }
    }
    transaction.commit().map_err(failed)
}

fn value(fields: &[&str], from: From) -> Option<Value> {
    Some(match from {
        From::Text(column) => Value::Text((*fields.get(column)?).to_owned()),
        From::Whole(column) => Value::Integer(fields.get(column)?.parse().ok()?),
        From::Hundredths(column) => {
            let (whole, hundredths) = fields.get(column)?.split_once('.')?;
            let hundredths: i64 = (hundredths.len() == 2).then(|| hundredths.parse().ok())??;
            Value::Integer(whole.parse::<i64>().ok()? * 100 + hundredths)
        }
    })
}

fn answer(db: &Connection, query: &Query) -> Result<Answer, Problem> {
    let mut statement = db.prepare(query.sqlite).map_err(failed)?;
    let columns = statement.column_count();
    let rows = statement
        .query_map([], |row| {
            let cells: Result<Vec<String>, _> = (0..columns)
                .map(|column| {
                    let scale = if column + 1 == columns { query.scale } else { 0 };
                    row.get(column).map(|value| text(value, scale))
                })
                .collect();
            Ok(cells?.join("|"))
        })
        .map_err(failed)?;
    let rows = rows.collect::<Result<_, _>>().map_err(failed)?;
    Ok(Answer { query: query.name.to_owned(), rows })
}

fn text(value: Value, scale: u32) -> String {
    match value {
        Value::Integer(number) if scale > 0 => {
            let unit = 10_i64.pow(scale);
            let width = scale as usize;
            format!("{}.{:0width$}", number / unit, (number % unit).abs())
        }
        Value::Integer(number) => number.to_string(),
        Value::Real(number) => number.to_string(),
        Value::Text(text) => text,
        Value::Null => NULL.to_owned(),
        Value::Blob(bytes) => format!("{bytes:?}"),
    }
}

/// Reads an answer file: a line `-- Q6` before the rows of each query.
pub fn parse(text: &str) -> Vec<Answer> {
    let mut answers: Vec<Answer> = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        if let Some(name) = line.strip_prefix("-- ") {
            answers.push(Answer { query: name.trim().to_owned(), rows: Vec::new() });
        } else if let Some(answer) = answers.last_mut() {
            answer.rows.push(line.to_owned());
        }
    }
    answers
}

/// Compares the answers, including their order.
///
/// # Errors
/// The first difference, as a sentence.
pub fn compare(expected: &[Answer], got: &[Answer]) -> Result<(), String> {
    let names =
        |answers: &[Answer]| answers.iter().map(|a| a.query.clone()).collect::<Vec<_>>().join(" ");
    if names(expected) != names(got) {
        return Err(format!(
            "the answers are to {:?} instead of {:?}",
            names(got),
            names(expected)
        ));
    }
    for (right, given) in expected.iter().zip(got) {
        let same_rows = right.rows.iter().zip(&given.rows).all(|(a, b)| same_row(a, b));
        if right.rows.len() != given.rows.len() || !same_rows {
            return Err(format!(
                "{} is {:?}; the right answer is {:?}",
                right.query, given.rows, right.rows
            ));
        }
    }
    Ok(())
}

fn same_row(a: &str, b: &str) -> bool {
    let (a, b): (Vec<&str>, Vec<&str>) = (a.split('|').collect(), b.split('|').collect());
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| same_cell(a.trim(), b.trim()))
}

fn same_cell(a: &str, b: &str) -> bool {
    match (a.parse::<f64>(), b.parse::<f64>()) {
        (Ok(a), Ok(b)) => (a - b).abs() <= RELATIVE * a.abs().max(b.abs()),
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(query: &str, rows: &[&str]) -> Answer {
        Answer { query: query.to_owned(), rows: rows.iter().map(|r| (*r).to_owned()).collect() }
    }

    /// The answers that DuckDB publishes for scale factor 0.01.
    #[test]
    fn sqlite_finds_the_known_answers() {
        let dir = tempfile::tempdir().expect("a directory");
        super::super::write_tables(0.01, dir.path()).expect("tables");
        let answers = expected(dir.path(), &super::super::QUERIES).expect("answers");
        let known = [
            given("Q6", &["1193053.2253"]),
            given("Q17", &["NULL"]),
            given("Q14", &["15.486545812284072"]),
            given("Q12", &["MAIL|64|86", "SHIP|61|96"]),
        ];
        compare(&known, &answers).expect("equal");
    }

    #[test]
    fn an_answer_file_is_read_by_query() {
        let text = "-- Q4\n1-URGENT       |93\n2-HIGH|103\n-- Q6\n1.5\n";
        let answers = parse(text);
        assert_eq!(
            answers,
            [given("Q4", &["1-URGENT       |93", "2-HIGH|103"]), given("Q6", &["1.5"])]
        );
    }

    #[test]
    fn numbers_are_compared_as_numbers_and_text_as_text() {
        let right = [given("Q12", &["MAIL|64.00|86"])];
        assert!(compare(&right, &[given("Q12", &["MAIL  |64|86.0"])]).is_ok());
        for wrong in ["SHIP|64|86", "MAIL|64.0001|86", "MAIL|64", "MAIL|64|"] {
            assert!(compare(&right, &[given("Q12", &[wrong])]).is_err(), "{wrong}");
        }
        assert!(compare(&right, &[given("Q12", &[])]).is_err(), "a row is missing");
        assert!(compare(&right, &[given("Q6", &["MAIL|64|86"])]).is_err(), "another query");
    }
}
