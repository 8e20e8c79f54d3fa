//! How a request to AWS is signed: Signature Version 4.
//!
//! The steps are those of "Create a signed AWS API request" in AWS's Identity and Access Management user guide.

use std::fmt::Write as _;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::{Digest as _, Sha256};

use crate::credentials::Credentials;

/// What is signed: a request for the path `/`.
#[derive(Debug)]
pub struct Request<'a> {
    /// As in `POST`.
    pub method: &'a str,
    /// What stands after the `?`, its fields encoded and in order.
    pub query: &'a str,
    /// Names in small letters and values, in the order of the names. Among them are `host` and `x-amz-date`.
    pub headers: &'a [(&'a str, &'a str)],
    /// The body.
    pub body: &'a [u8],
}

/// For whom and when the signature holds.
#[derive(Debug, Clone, Copy)]
pub struct Scope<'a> {
    /// As in `20150830T123600Z`.
    pub time: &'a str,
    /// As in `eu-central-1`.
    pub region: &'a str,
    /// As in `ec2`.
    pub service: &'a str,
}

/// The value of the header `authorization`.
pub fn authorization(request: &Request<'_>, scope: Scope<'_>, credentials: &Credentials) -> String {
    let names: Vec<&str> = request.headers.iter().map(|(name, _)| *name).collect();
    let names = names.join(";");
    let within = scope.within();
    let canonical = hex(&Sha256::digest(canonical(request, &names)));
    let text = format!("AWS4-HMAC-SHA256\n{}\n{within}\n{canonical}", scope.time);
    let signature = hex(&mac(&scope.key(credentials.secret()), text.as_bytes()));
    format!(
        "AWS4-HMAC-SHA256 Credential={}/{within}, SignedHeaders={names}, Signature={signature}",
        credentials.id()
    )
}

fn canonical(request: &Request<'_>, names: &str) -> String {
    let mut text = format!("{}\n/\n{}\n", request.method, request.query);
    for (name, value) in request.headers {
        // A write to a text can't fail.
        let _ = writeln!(text, "{name}:{}", value.trim());
    }
    let _ = write!(text, "\n{names}\n{}", hex(&Sha256::digest(request.body)));
    text
}

impl Scope<'_> {
    fn day(&self) -> &str {
        self.time.get(..8).unwrap_or(self.time)
    }

    fn within(&self) -> String {
        format!("{}/{}/{}/aws4_request", self.day(), self.region, self.service)
    }

    fn key(&self, secret: &str) -> [u8; 32] {
        let key = mac(format!("AWS4{secret}").as_bytes(), self.day().as_bytes());
        let key = mac(&key, self.region.as_bytes());
        mac(&mac(&key, self.service.as_bytes()), b"aws4_request")
    }
}

fn mac(key: &[u8], text: &[u8]) -> [u8; 32] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length is possible");
    mac.update(text);
    mac.finalize().into_bytes().into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // The pair of keys of AWS's documentation, which opens nothing.
    fn credentials() -> Credentials {
        Credentials::new("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", None)
    }

    const TIME: &str = "20150830T123600Z";

    /// The example of a signature, step by step, in AWS's General Reference ("Signature Version 4 signing process", the request
    /// `Action=ListUsers` to IAM).
    #[test]
    fn the_documented_example_comes_out() {
        let headers = [
            ("content-type", "application/x-www-form-urlencoded; charset=utf-8"),
            ("host", "iam.amazonaws.com"),
            ("x-amz-date", TIME),
        ];
        let query = "Action=ListUsers&Version=2010-05-08";
        let request = Request { method: "GET", query, headers: &headers, body: b"" };
        let scope = Scope { time: TIME, region: "us-east-1", service: "iam" };
        let canonical = canonical(&request, "content-type;host;x-amz-date");
        assert_eq!(
            hex(&Sha256::digest(canonical)),
            "f536975d06c0309214f805bb90ccff089219ecd68b2577efef23edd43b7e1a59"
        );
        assert_eq!(
            hex(&scope.key(credentials().secret())),
            "c4afb1cc5771d871763a393e44b703571b55cc28424d1a5e86da6ed3c154a4b9"
        );
        assert_eq!(
            authorization(&request, scope, &credentials()),
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/iam/aws4_request, \
             SignedHeaders=content-type;host;x-amz-date, \
             Signature=5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7"
        );
    }

    /// The case `post-x-www-form-urlencoded` of AWS's Signature Version 4 test suite.
    #[test]
    fn a_form_of_the_test_suite_comes_out() {
        let headers = [
            ("content-type", "application/x-www-form-urlencoded"),
            ("host", "example.amazonaws.com"),
            ("x-amz-date", TIME),
        ];
        let request =
            Request { method: "POST", query: "", headers: &headers, body: b"Param1=value1" };
        let scope = Scope { time: TIME, region: "us-east-1", service: "service" };
        let signed = authorization(&request, scope, &credentials());
        assert!(
            signed.ends_with("ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"),
            "{signed}"
        );
    }
}
