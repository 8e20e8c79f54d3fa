//! Reads columns as our types. An invalid value is an error and never a panic, because the file may be
//! damaged.

use perigee_model::LayerId;
use perigee_model::limits::VOLUME_BYTES;
use perigee_model::volume::BLOCK_BYTES;
use rusqlite::Row;
use rusqlite::types::{FromSqlError, FromSqlResult, Type, ValueRef};

use crate::catalog::Result;

/// A column whose text is parsed into one of our types.
pub(super) struct Parsed<T>(pub(super) T);

impl<T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>> rusqlite::types::FromSql
    for Parsed<T>
{
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        value.as_str()?.parse().map(Parsed).map_err(|error| FromSqlError::Other(Box::new(error)))
    }
}

/// A column of text in the form that the type reads.
pub(super) fn parsed<T>(row: &Row<'_>, column: usize) -> Result<T>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    row.get::<_, Parsed<T>>(column).map(|parsed| parsed.0)
}

pub(super) fn optional_parsed<T>(row: &Row<'_>, column: usize) -> Result<Option<T>>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
{
    row.get::<_, Option<Parsed<T>>>(column).map(|found| found.map(|parsed| parsed.0))
}

/// A column with a number from 0 on. SQLite has signed ones only.
pub(super) fn unsigned(row: &Row<'_>, column: usize) -> Result<u64> {
    let value: i64 = row.get(column)?;
    u64::try_from(value).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, Type::Integer, Box::new(error))
    })
}

pub(super) fn optional_unsigned(row: &Row<'_>, column: usize) -> Result<Option<u64>> {
    match row.get_ref(column)? {
        ValueRef::Null => Ok(None),
        _ => unsigned(row, column).map(Some),
    }
}

/// The size of a layer or a volume. It is checked, because memory is allocated for it.
pub(super) fn layer_bytes(row: &Row<'_>, column: usize) -> Result<u64> {
    let size_bytes = remote_bytes(row, column)?;
    if size_bytes > 0 && size_bytes.is_multiple_of(BLOCK_BYTES) {
        Ok(size_bytes)
    } else {
        Err(no_size(column, size_bytes))
    }
}

/// A remote parent's size may end within a block.
pub(super) fn remote_bytes(row: &Row<'_>, column: usize) -> Result<u64> {
    let size_bytes = unsigned(row, column)?;
    let is_possible = i128::from(size_bytes) <= VOLUME_BYTES.max;
    if is_possible { Ok(size_bytes) } else { Err(no_size(column, size_bytes)) }
}

fn no_size(column: usize, size_bytes: u64) -> rusqlite::Error {
    let why = format!("no layer has {size_bytes} bytes");
    rusqlite::Error::FromSqlConversionFailure(column, Type::Integer, why.into())
}

/// The error for a damaged catalog in which a chain contains a layer twice.
pub(super) fn going_round(layer: LayerId) -> rusqlite::Error {
    let why = format!("layer {layer} is its own ancestor");
    rusqlite::Error::FromSqlConversionFailure(2, Type::Text, why.into())
}

/// The number as SQLite has it. A number from 2^63 on is an error.
pub(super) fn signed(value: u64) -> Result<i64> {
    i64::try_from(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}
