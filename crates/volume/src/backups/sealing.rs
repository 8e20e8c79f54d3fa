//! Encrypted objects of a target: all but the marker. Each is bound to its key at the target, so no object takes the place of another one.
//!
//! | bytes of an object | |
//! |---|---|
//! | 8 | `PERIGEES` |
//! | 4 | the format, little endian |
//! | 32 | random: with the tenant's key they give this object's own key (HKDF-SHA256) |
//! | the rest | frames of at most 64 KiB of the content, each with a tag of 16 bytes (AES-256-GCM) |
//!
//! The nonce of a frame is its number, and whether it is the last one. So frames that are exchanged, cut off or of another object are refused, and the first frames can
//! be read alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use perigee_block::locking::lock;
use perigee_http::certificate::hex;
use perigee_model::backup::BackupTarget;
use perigee_model::backup_key::BackupKey;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::error::Unspecified;
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::format::FORMAT;

/// The key of the file that shows that a directory or prefix has encrypted backups. An older volume server takes these for none.
pub const SEALED_MARKER_KEY: &str = "perigee-sealed-backups";
const MARKER_START: &str = "encrypted backups of Perigee, format 1, key ";

const MAGIC: [u8; 8] = *b"PERIGEES";
const SALT_AT: usize = 12;
const SALT_BYTES: usize = 32;
const HEADER_BYTES: usize = SALT_AT + SALT_BYTES;
const FRAME_BYTES: usize = 64 << 10;
const TAG_BYTES: usize = 16;
const ID_BYTES: usize = 8;

/// The keys that the controller has sent, by the target as a layer's source: for layers that get their bytes from there.
static SENT: Mutex<BTreeMap<String, BackupKey>> = Mutex::new(BTreeMap::new());
/// So many are remembered.
const SENT_MAX: usize = 10_000;
/// The targets whose key is wanted, and was not sent since the start.
static LACKING: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Remembers the key of a target, which was right.
pub fn remember(at: &BackupTarget, key: &BackupKey) {
    let source = at.as_source();
    lock(&LACKING).remove(&source);
    let mut sent = lock(&SENT);
    if sent.len() >= SENT_MAX && !sent.contains_key(&source) {
        sent.pop_first();
    }
    sent.insert(source, key.clone());
}

/// The key of a target that the controller has sent. If it has sent none, [`is_lacking`] says so from now on.
pub fn sent(at: &BackupTarget) -> Option<BackupKey> {
    let source = at.as_source();
    let found = lock(&SENT).get(&source).cloned();
    if found.is_none() {
        let mut lacking = lock(&LACKING);
        if lacking.len() < SENT_MAX {
            lacking.insert(source);
        }
    }
    found
}

/// Whether somebody wants the key of this target, and nobody has sent it since the start.
pub fn is_lacking(at: &BackupTarget) -> bool {
    lock(&LACKING).contains(&at.as_source())
}

/// A tenant's key, for the objects of a target.
pub struct Seal {
    key: BackupKey,
    names: hmac::Key,
    id: String,
}

/// The key is not shown.
impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Seal({})", self.id)
    }
}

impl Seal {
    /// # Errors
    /// None that can be caused: the lengths are right.
    pub fn new(key: &BackupKey) -> Result<Self, Unspecified> {
        let of_names = Salt::new(HKDF_SHA256, b"perigee backups: names").extract(key.bytes());
        let names = hmac::Key::from(of_names.expand(&[&b"names"[..]], hmac::HMAC_SHA256)?);
        let id = hex(&hmac::sign(&names, b"id").as_ref()[..ID_BYTES]);
        Ok(Self { key: key.clone(), names, id })
    }

    /// Tells this key from others, and tells nothing of it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The content of [`SEALED_MARKER_KEY`].
    pub fn marker(&self) -> Vec<u8> {
        format!("{MARKER_START}{}\n", self.id).into_bytes()
    }

    /// What stands for a checksum in an object's name, which says nothing of the content.
    pub fn name_of(&self, sha256: &str) -> String {
        hex(hmac::sign(&self.names, sha256.as_bytes()).as_ref())
    }

    fn object_key(&self, salt: &[u8]) -> Result<LessSafeKey, Unspecified> {
        let secret = Salt::new(HKDF_SHA256, salt).extract(self.key.bytes());
        let key =
            UnboundKey::from(secret.expand(&[&b"perigee backups: object"[..]], &AES_256_GCM)?);
        Ok(LessSafeKey::new(key))
    }

    /// Encrypts an object for its key at the target.
    ///
    /// # Errors
    /// If there are no random numbers.
    pub fn seal(&self, at: &str, bytes: &[u8]) -> Result<Vec<u8>, Unspecified> {
        let mut salt = [0; SALT_BYTES];
        SystemRandom::new().fill(&mut salt)?;
        let key = self.object_key(&salt)?;
        let count = frames(bytes.len());
        let mut sealed = Vec::with_capacity(HEADER_BYTES + bytes.len() + count * TAG_BYTES);
        sealed.extend(MAGIC);
        sealed.extend(FORMAT.to_le_bytes());
        sealed.extend(salt);
        for number in 0..count {
            let start = number * FRAME_BYTES;
            let end = bytes.len().min(start + FRAME_BYTES);
            let begin = sealed.len();
            sealed.extend_from_slice(&bytes[start..end]);
            let nonce = nonce(number, number + 1 == count);
            let aad = Aad::from(at.as_bytes());
            let tag = key.seal_in_place_separate_tag(nonce, aad, &mut sealed[begin..])?;
            sealed.extend_from_slice(tag.as_ref());
        }
        Ok(sealed)
    }

    /// The content of an object that was read under its key at the target.
    ///
    /// # Errors
    /// Why it is not what was stored there.
    pub fn open(&self, at: &str, sealed: &[u8]) -> Result<Vec<u8>, String> {
        self.open_frames(at, sealed, true)
    }

    /// The first bytes of an object, or all if it has fewer. [`start_bytes`] says how much of it is read for that.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_start(&self, at: &str, sealed: &[u8], bytes: u64) -> Result<Vec<u8>, String> {
        let is_end = (sealed.len() as u64) < start_bytes(bytes);
        let read = if is_end { sealed } else { &sealed[..sealed.len() - 1] };
        let mut content = self.open_frames(at, read, is_end)?;
        content.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(content)
    }

    fn open_frames(&self, at: &str, sealed: &[u8], is_end: bool) -> Result<Vec<u8>, String> {
        let changed = || "its bytes are not what was encrypted with this key".to_owned();
        let Some((header, rest)) = sealed.split_at_checked(HEADER_BYTES) else {
            return Err("it is cut off".to_owned());
        };
        if header[..8] != MAGIC || header[8..SALT_AT] != FORMAT.to_le_bytes() {
            return Err("it is not encrypted in a way that this program knows".to_owned());
        }
        let key = self.object_key(&header[SALT_AT..]).map_err(|_| changed())?;
        let count = rest.len().div_ceil(FRAME_BYTES + TAG_BYTES);
        if count == 0 {
            return Err("it is cut off".to_owned());
        }
        let mut content = Vec::with_capacity(rest.len());
        for (number, frame) in rest.chunks(FRAME_BYTES + TAG_BYTES).enumerate() {
            let (mut frame, is_last) = (frame.to_vec(), is_end && number + 1 == count);
            let aad = Aad::from(at.as_bytes());
            let opened = key.open_in_place(nonce(number, is_last), aad, &mut frame);
            content.extend_from_slice(opened.map_err(|_| changed())?);
        }
        Ok(content)
    }
}

fn frames(bytes: usize) -> usize {
    bytes.div_ceil(FRAME_BYTES).max(1)
}

/// No other frame of the object has it, and no other object has the key.
fn nonce(number: usize, is_last: bool) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[..8].copy_from_slice(&(number as u64).to_le_bytes());
    nonce[8] = u8::from(is_last);
    Nonce::assume_unique_for_key(nonce)
}

/// The id of the key with which the backups of a target are encrypted; `None`: this is no such marker.
pub fn id_of_marker(marker: &[u8]) -> Option<&str> {
    let id = std::str::from_utf8(marker).ok()?.strip_prefix(MARKER_START)?.strip_suffix('\n')?;
    let is_id = id.len() == 2 * ID_BYTES && id.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_id.then_some(id)
}

/// How many bytes an object of so many bytes has at the target.
pub fn sealed_bytes(bytes: u64) -> u64 {
    let tags = bytes.div_ceil(FRAME_BYTES as u64).max(1).saturating_mul(TAG_BYTES as u64);
    bytes.saturating_add(tags).saturating_add(HEADER_BYTES as u64)
}

/// How many bytes of an object are read for its first so many bytes: whole frames, and one byte more, which says whether others follow.
pub fn start_bytes(bytes: u64) -> u64 {
    let frames = bytes.div_ceil(FRAME_BYTES as u64).max(1);
    let frame_bytes = (FRAME_BYTES + TAG_BYTES) as u64;
    frames.saturating_mul(frame_bytes).saturating_add(HEADER_BYTES as u64 + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AT: &str = "layers/9b2f/00000001-ab";

    fn seal_of(byte: u8) -> Seal {
        Seal::new(&BackupKey::new([byte; BackupKey::BYTES])).expect("a key")
    }

    /// Contents around the length of a frame, and small ones.
    fn contents() -> impl Strategy<Value = Vec<u8>> {
        let length =
            prop_oneof![0..200_usize, FRAME_BYTES - 2..FRAME_BYTES + 3, Just(3 * FRAME_BYTES)];
        (length, any::<u8>()).prop_map(|(length, seed)| {
            (0..length)
                .map(|at| seed.wrapping_add(u8::try_from(at % 251).expect("a byte")))
                .collect()
        })
    }

    proptest! {
        #[test]
        fn a_changed_byte_another_place_and_another_key_are_refused(
            content in contents(),
            at in any::<prop::sample::Index>(),
            change in 1..=u8::MAX,
        ) {
            let seal = seal_of(1);
            let sealed = seal.seal(AT, &content).expect("sealed");
            prop_assert_eq!(sealed.len() as u64, sealed_bytes(content.len() as u64));
            prop_assert_eq!(seal.open(AT, &sealed), Ok(content));
            let place = at.index(sealed.len());
            let mut changed = sealed.clone();
            changed[place] ^= change;
            prop_assert!(seal.open(AT, &changed).is_err(), "byte {} was changed", place);
            prop_assert!(seal.open(AT, &sealed[..place]).is_err(), "cut off at {}", place);
            prop_assert!(seal.open("layers/9b2f/00000002-ab", &sealed).is_err());
            prop_assert!(seal_of(2).open(AT, &sealed).is_err());
        }

        #[test]
        fn the_start_of_an_object_is_read_alone_and_a_changed_byte_of_it_is_found(
            content in contents(),
            bytes in prop_oneof![0..300_u64, FRAME_BYTES as u64 - 1..FRAME_BYTES as u64 + 2],
            at in any::<prop::sample::Index>(),
        ) {
            let seal = seal_of(1);
            let sealed = seal.seal(AT, &content).expect("sealed");
            let asked = usize::try_from(start_bytes(bytes)).expect("few");
            let read = &sealed[..asked.min(sealed.len())];
            let wanted = usize::try_from(bytes).expect("few").min(content.len());
            prop_assert_eq!(seal.open_start(AT, read, bytes), Ok(content[..wanted].to_vec()));
            // The byte that says that others follow is not opened.
            let opened = if read.len() < asked { read.len() } else { read.len() - 1 };
            let mut changed = read.to_vec();
            changed[at.index(opened)] ^= 1;
            prop_assert!(seal.open_start(AT, &changed, bytes).is_err());
        }
    }

    #[test]
    fn each_changed_byte_of_an_object_is_found() {
        let seal = seal_of(1);
        let sealed = seal.seal(AT, b"what a guest has written").expect("sealed");
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            seal.open(AT, &changed).expect_err("a changed byte");
        }
        assert_ne!(seal.seal(AT, b"x"), seal.seal(AT, b"x"), "no two objects have one key");
    }

    #[test]
    fn the_frames_of_an_object_are_not_exchanged_or_left_out() {
        let (seal, content) = (seal_of(1), vec![5; 3 * FRAME_BYTES]);
        let sealed = seal.seal(AT, &content).expect("sealed");
        let frame = |number: usize| {
            let start = HEADER_BYTES + number * (FRAME_BYTES + TAG_BYTES);
            sealed[start..start + FRAME_BYTES + TAG_BYTES].to_vec()
        };
        for order in [&[1, 0, 2][..], &[0, 1], &[0, 2], &[0, 1, 2, 2], &[0, 1, 1, 2]] {
            let frames = order.iter().flat_map(|number| frame(*number));
            let other: Vec<u8> = sealed[..HEADER_BYTES].iter().copied().chain(frames).collect();
            seal.open(AT, &other).expect_err("other frames");
        }
    }

    #[test]
    fn a_marker_names_its_key_and_a_name_says_nothing_of_the_content() {
        let (one, two) = (seal_of(1), seal_of(2));
        assert_eq!(id_of_marker(&one.marker()), Some(one.id()));
        assert_ne!(one.id(), two.id());
        for bad in [&b""[..], b"backups of Perigee, format 1\n", &one.marker()[..20]] {
            assert_eq!(id_of_marker(bad), None);
        }
        assert_ne!(one.name_of("ab"), two.name_of("ab"));
        assert_eq!(one.name_of("ab").len(), 64);
    }

    #[test]
    fn a_key_that_was_not_sent_is_lacking_until_it_is() {
        let at = BackupTarget { address: "/srv/of-this-test".to_owned(), endpoint: None };
        assert!(!is_lacking(&at));
        assert_eq!(sent(&at), None);
        assert!(is_lacking(&at));
        let key = BackupKey::new([3; BackupKey::BYTES]);
        remember(&at, &key);
        assert_eq!((sent(&at), is_lacking(&at)), (Some(key), false));
    }
}
