//! The handshake's frames: options and the answers to them.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{FramingError, OPTION_BYTES_MAX, OPTION_MAGIC, STRING_BYTES_MAX, bound, length_u32};

const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// The head of one option from a client; its data follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionHead {
    pub option: u32,
    pub length_bytes: u32,
}

impl OptionHead {
    /// Magic, option, length.
    pub const BYTES: usize = 16;

    /// # Errors
    /// If it does not begin with `IHAVEOPT`, or announces more than [`OPTION_BYTES_MAX`].
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, FramingError> {
        let mut bytes = bytes.as_slice();
        let magic = bytes.get_u64();
        if magic != OPTION_MAGIC {
            return Err(FramingError::Magic { what: "an option", found: magic });
        }
        let head = Self { option: bytes.get_u32(), length_bytes: bytes.get_u32() };
        bound("an option", head.length_bytes.into(), OPTION_BYTES_MAX)?;
        Ok(head)
    }
}

/// One whole option, as a client sends it.
pub fn encode_option(option: u32, data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(OptionHead::BYTES + data.len());
    out.put_u64(OPTION_MAGIC);
    out.put_u32(option);
    out.put_u32(length_u32(data.len()));
    out.put_slice(data);
    out.freeze()
}

/// The head of one answer to an option; its data follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionReplyHead {
    pub option: u32,
    pub kind: u32,
    pub length_bytes: u32,
}

impl OptionReplyHead {
    /// Magic, option, kind of the reply, length.
    pub const BYTES: usize = 20;

    /// # Errors
    /// If the magic is another one, or it announces more than [`OPTION_BYTES_MAX`].
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Result<Self, FramingError> {
        let mut bytes = bytes.as_slice();
        let magic = bytes.get_u64();
        if magic != OPTION_REPLY_MAGIC {
            return Err(FramingError::Magic { what: "an option's reply", found: magic });
        }
        let head =
            Self { option: bytes.get_u32(), kind: bytes.get_u32(), length_bytes: bytes.get_u32() };
        bound("an option's reply", head.length_bytes.into(), OPTION_BYTES_MAX)?;
        Ok(head)
    }
}

/// A reply with its head. `kind` is one of [`super::reply`].
pub fn encode_option_reply(option: u32, kind: u32, data: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(OptionReplyHead::BYTES + data.len());
    out.put_u64(OPTION_REPLY_MAGIC);
    out.put_u32(option);
    out.put_u32(kind);
    out.put_u32(length_u32(data.len()));
    out.put_slice(data);
    out.freeze()
}

/// A length and that many bytes of text, as names and queries are sent.
pub fn put_string(out: &mut BytesMut, text: &str) {
    out.put_u32(length_u32(text.len()));
    out.put_slice(text.as_bytes());
}

/// Takes what [`put_string`] put.
pub fn take_string(data: &mut Bytes) -> Result<String, FramingError> {
    const SHORT: FramingError = FramingError::Malformed("a string is longer than its option");
    let length_bytes = data.try_get_u32().map_err(|_| SHORT)?;
    bound("a string", length_bytes.into(), STRING_BYTES_MAX)?;
    let length = length_bytes as usize;
    if data.remaining() < length {
        return Err(SHORT);
    }
    String::from_utf8(data.split_to(length).into())
        .map_err(|_| FramingError::Malformed("a string is not UTF-8"))
}

/// The data of `INFO` and `GO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GoOption {
    pub name: String,
    pub infos: Vec<u16>,
}

impl GoOption {
    /// # Errors
    /// If the data are cut, or have other items than they announce.
    pub fn parse(mut data: Bytes) -> Result<Self, FramingError> {
        const SHORT: FramingError = FramingError::Malformed("GO or INFO ends too early");
        let name = take_string(&mut data)?;
        let count = data.try_get_u16().map_err(|_| SHORT)?;
        if data.remaining() != usize::from(count) * 2 {
            return Err(FramingError::Malformed(
                "GO or INFO has another number of items than announced",
            ));
        }
        Ok(Self { name, infos: (0..count).map(|_| data.get_u16()).collect() })
    }

    /// The option's data, without its head.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        put_string(&mut out, &self.name);
        out.put_u16(u16::try_from(self.infos.len()).expect("there are only a few kinds of info"));
        for info in &self.infos {
            out.put_u16(*info);
        }
        out.freeze()
    }
}

/// The data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaContextOption {
    pub name: String,
    pub queries: Vec<String>,
}

impl MetaContextOption {
    /// # Errors
    /// If the data are cut, or have other queries than they announce.
    pub fn parse(mut data: Bytes) -> Result<Self, FramingError> {
        let name = take_string(&mut data)?;
        let count = data
            .try_get_u32()
            .map_err(|_| FramingError::Malformed("a context option ends too early"))?;
        // Not `collect` with a size hint: the count is the client's word only.
        let mut queries = Vec::new();
        for _ in 0..count {
            queries.push(take_string(&mut data)?);
        }
        if data.has_remaining() {
            return Err(FramingError::Malformed("a context option has bytes left over"));
        }
        Ok(Self { name, queries })
    }

    /// The option's data, without its head.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        put_string(&mut out, &self.name);
        out.put_u32(length_u32(self.queries.len()));
        for query in &self.queries {
            put_string(&mut out, query);
        }
        out.freeze()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{info, option};
    use super::*;

    #[test]
    fn an_option_longer_than_the_bound_is_a_framing_error() {
        let mut bytes = [0; OptionHead::BYTES];
        bytes.copy_from_slice(&encode_option(option::GO, &[]));
        bytes[12..].copy_from_slice(&u32::MAX.to_be_bytes());
        assert!(matches!(OptionHead::parse(&bytes), Err(FramingError::TooLong { .. })));
    }

    #[test]
    fn a_go_option_survives_its_encoding() {
        let go = GoOption { name: "data@3".into(), infos: vec![info::NAME, info::BLOCK_SIZE] };
        assert_eq!(GoOption::parse(go.encode()), Ok(go));
    }

    #[test]
    fn a_context_option_that_promises_more_than_it_has_is_refused() {
        let mut out = BytesMut::new();
        put_string(&mut out, "data");
        out.put_u32(u32::MAX);
        assert!(MetaContextOption::parse(out.freeze()).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_parser_panic(data in proptest::collection::vec(any::<u8>(), 0..200)) {
            let bytes = Bytes::from(data.clone());
            drop(GoOption::parse(bytes.clone()));
            drop(MetaContextOption::parse(bytes));
            if let Some(head) = data.first_chunk() {
                drop(OptionHead::parse(head));
            }
            if let Some(head) = data.first_chunk() {
                drop(OptionReplyHead::parse(head));
            }
        }
    }
}
