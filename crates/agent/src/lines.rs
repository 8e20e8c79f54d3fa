//! Reads lines from a socket, with a limit on their length.

use tokio::io::{AsyncBufRead, AsyncBufReadExt};

/// Why there is no next line.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("a line is longer than {0} bytes")]
    TooLong(usize),
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// The next line without its end, or `None` at the end of the stream. A last line without an end
/// is not a line.
///
/// This is safe to cancel: the part of a line that was read stays in `partial`.
pub async fn next_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    partial: &mut Vec<u8>,
    bytes_max: usize,
) -> Result<Option<Vec<u8>>, LineError> {
    loop {
        let available = reader.fill_buf().await?;
        if available.is_empty() {
            return Ok(None);
        }
        let end = available.iter().position(|byte| *byte == b'\n');
        let taken = end.unwrap_or(available.len());
        if partial.len() + taken > bytes_max {
            return Err(LineError::TooLong(bytes_max));
        }
        partial.extend_from_slice(&available[..taken]);
        reader.consume(end.map_or(taken, |at| at + 1));
        if end.is_some() {
            return Ok(Some(std::mem::take(partial)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read_all(text: &[u8], bytes_max: usize) -> Vec<Result<Vec<u8>, String>> {
        let mut reader = tokio::io::BufReader::with_capacity(4, text);
        let mut partial = Vec::new();
        let mut lines = Vec::new();
        loop {
            match next_line(&mut reader, &mut partial, bytes_max).await {
                Ok(Some(line)) => lines.push(Ok(line)),
                Ok(None) => return lines,
                Err(error) => {
                    lines.push(Err(error.to_string()));
                    return lines;
                }
            }
        }
    }

    #[tokio::test]
    async fn lines_longer_than_the_buffer_arrive_whole() {
        let lines = read_all(b"first line\n\nx\n", 64).await;
        assert_eq!(lines, [Ok(b"first line".to_vec()), Ok(Vec::new()), Ok(b"x".to_vec())]);
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_not_a_line() {
        assert_eq!(read_all(b"a\nhalf", 64).await, [Ok(b"a".to_vec())]);
    }

    #[tokio::test]
    async fn a_line_beyond_the_bound_is_an_error() {
        let lines = read_all(b"ok\n123456789\n", 8).await;
        assert_eq!(lines[0], Ok(b"ok".to_vec()));
        assert!(lines[1].as_ref().is_err_and(|e| e.contains("8 bytes")), "{lines:?}");
    }
}
