//! The common name in a certificate's subject. The certificate was verified before; this only looks for one field.
//!
//! A subject is a sequence of sets of pairs, each of an attribute's type and its value (RFC 5280, section 4.1.2.4),
//! in DER: a byte for the kind, the length, the content.

use tokio_rustls::rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

/// DER's kind of a sequence (X.690, 8.9), in its constructed form.
pub const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
/// DER's kind of an object identifier (X.690, 8.19).
pub const OBJECT_IDENTIFIER: u8 = 0x06;
const UTF8_STRING: u8 = 0x0c;
const NUMERIC_STRING: u8 = 0x12;
const PRINTABLE_STRING: u8 = 0x13;
const IA5_STRING: u8 = 0x16;

/// `id-at-commonName`, 2.5.4.3.
const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03];

/// The first common name of the certificate's subject, if it has one and it is text.
pub fn of(certificate: &CertificateDer<'_>) -> Option<String> {
    in_subject(EndEntityCert::try_from(certificate).ok()?.subject())
}

fn in_subject(mut subject: &[u8]) -> Option<String> {
    while !subject.is_empty() {
        let mut pairs = take(&mut subject, SET)?;
        while !pairs.is_empty() {
            let mut pair = take(&mut pairs, SEQUENCE)?;
            if take(&mut pair, OBJECT_IDENTIFIER)? == COMMON_NAME {
                return text(pair);
            }
        }
    }
    None
}

fn text(value: &[u8]) -> Option<String> {
    let mut rest = value;
    let kind = *value.first()?;
    if !matches!(kind, UTF8_STRING | NUMERIC_STRING | PRINTABLE_STRING | IA5_STRING) {
        return None;
    }
    let bytes = take(&mut rest, kind)?;
    String::from_utf8(bytes.to_vec()).ok()
}

/// Takes one element of this kind off the front of `input` and returns its content. A length of more than two bytes
/// is refused: no name is that long.
pub fn take<'a>(input: &mut &'a [u8], kind: u8) -> Option<&'a [u8]> {
    let (length, rest) = match **input {
        [found, short @ 0..=0x7f, ref rest @ ..] if found == kind => (usize::from(short), rest),
        [found, 0x81, one, ref rest @ ..] if found == kind => (usize::from(one), rest),
        [found, 0x82, high, low, ref rest @ ..] if found == kind => {
            (usize::from(u16::from_be_bytes([high, low])), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    *input = rest;
    Some(content)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue, KeyPair};

    use super::*;

    fn certificate(attributes: Vec<(DnType, DnValue)>) -> CertificateDer<'static> {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        for (kind, value) in attributes {
            params.distinguished_name.push(kind, value);
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_common_name_is_found_among_other_attributes() {
        let long = "h".repeat(200);
        for name in ["host-a", "Göteborg 1", &long] {
            let certificate = certificate(vec![
                (DnType::OrganizationName, "Perigee".into()),
                (DnType::CommonName, name.into()),
                (DnType::CountryName, "SE".into()),
            ]);
            assert_eq!(of(&certificate).as_deref(), Some(name));
        }
        let printable = DnValue::PrintableString("host-b".try_into().unwrap());
        let certificate = certificate(vec![(DnType::CommonName, printable)]);
        assert_eq!(of(&certificate).as_deref(), Some("host-b"));
    }

    #[test]
    fn a_subject_without_a_common_name_has_none() {
        assert_eq!(of(&certificate(vec![])), None);
        assert_eq!(of(&certificate(vec![(DnType::OrganizationName, "host-a".into())])), None);
    }

    #[test]
    fn a_common_name_that_is_not_plain_text_is_none() {
        let wide = DnValue::BmpString("host-a".try_into().unwrap());
        assert_eq!(of(&certificate(vec![(DnType::CommonName, wide)])), None);
    }

    #[test]
    fn damaged_subjects_are_refused_without_a_panic() {
        let certificate = certificate(vec![(DnType::CommonName, "host-a".into())]);
        let subject = EndEntityCert::try_from(&certificate).unwrap().subject().to_vec();
        for end in 0..subject.len() {
            assert_eq!(in_subject(&subject[..end]), None);
        }
        for at in 0..subject.len() {
            for byte in [0, 0x7f, 0x80, 0x81, 0x82, 0x83, 0xff] {
                let mut damaged = subject.clone();
                damaged[at] = byte;
                let _ = in_subject(&damaged);
            }
        }
    }
}
