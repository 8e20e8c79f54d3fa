//! What EC2's errors mean. Their codes are those of "Error codes for the Amazon EC2 API" in AWS's EC2 developer guide.

use crate::provider::{CloudError, CloudErrorKind, short};
use crate::xml::Element;

/// An error with EC2's code for it.
#[derive(Debug)]
pub struct Failed {
    /// As in `InvalidInstanceID.NotFound`; empty if there is none.
    pub code: String,
    /// The error.
    pub error: CloudError,
}

impl From<CloudError> for Failed {
    fn from(error: CloudError) -> Self {
        Self { code: String::new(), error }
    }
}

impl From<Failed> for CloudError {
    fn from(failed: Failed) -> Self {
        failed.error
    }
}

/// The error of an answer with this HTTP status.
pub fn of(what: &str, status: u16, body: &[u8]) -> Failed {
    let answer = Element::parse(body).unwrap_or_default();
    let said = answer.at("Errors/Error").or_else(|| answer.at("Error"));
    let text = |way: &str| said.and_then(|said| said.text(way)).unwrap_or_default();
    let (code, message) = (text("Code"), text("Message"));
    let kind = kind(code, status);
    let why = match (code, message) {
        ("", _) => format!("HTTP status {status} without a reason"),
        (code, "") => short(code),
        (code, message) => format!("{} ({})", short(message), short(code)),
    };
    let error = CloudError::new(kind, format!("{what}: {kind}: {why}"));
    Failed { code: code.to_owned(), error }
}

fn kind(code: &str, status: u16) -> CloudErrorKind {
    match code {
        "RequestLimitExceeded"
        | "Throttling"
        | "ThrottlingException"
        | "SlowDown"
        | "EC2ThrottledException"
        | "BandwidthLimitExceeded" => CloudErrorKind::Throttled,
        "UnauthorizedOperation"
        | "AuthFailure"
        | "AccessDenied"
        | "AccessDeniedException"
        | "InvalidClientTokenId"
        | "SignatureDoesNotMatch"
        | "ExpiredToken"
        | "RequestExpired"
        | "MissingAuthenticationToken"
        | "IncompleteSignature"
        | "OptInRequired"
        | "PendingVerification"
        | "Blocked"
        | "NotAuthorized"
        | "AuthFailure.ServiceLinkedRoleCreationNotPermitted" => CloudErrorKind::NotAllowed,
        "MaxSpotInstanceCountExceeded" | "ResourceCountExceeded" => CloudErrorKind::Quota,
        "SpotMaxPriceTooLow" => CloudErrorKind::NoCapacity,
        // An earlier request with this token has made something, or still does so.
        "IdempotentParameterMismatch"
        | "IdempotentInstanceTerminated"
        | "ConcurrentIdempotentRequest"
        | "RequestInProgress" => CloudErrorKind::Unclear,
        _ if code.starts_with("Insufficient") => CloudErrorKind::NoCapacity,
        _ if code.ends_with("LimitExceeded") => CloudErrorKind::Quota,
        "" if status == 429 => CloudErrorKind::Throttled,
        "" if status == 401 || status == 403 => CloudErrorKind::NotAllowed,
        // Something before EC2 has answered, or EC2 does not know itself.
        _ if status >= 500 || code.is_empty() => CloudErrorKind::Unclear,
        _ => CloudErrorKind::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_kinds_whatever_the_status() {
        use CloudErrorKind::{NoCapacity, NotAllowed, Quota, Refused, Throttled, Unclear};
        for (code, status, expected) in [
            ("InsufficientInstanceCapacity", 500, NoCapacity),
            ("InsufficientFreeAddressesInSubnet", 400, NoCapacity),
            ("VcpuLimitExceeded", 400, Quota),
            ("InstanceLimitExceeded", 400, Quota),
            ("MaxSpotInstanceCountExceeded", 400, Quota),
            ("RequestLimitExceeded", 503, Throttled),
            ("Throttling", 400, Throttled),
            ("UnauthorizedOperation", 403, NotAllowed),
            ("AuthFailure", 401, NotAllowed),
            ("InvalidAMIID.NotFound", 400, Refused),
            ("IdempotentParameterMismatch", 400, Unclear),
            ("InternalError", 500, Unclear),
            ("Unavailable", 503, Unclear),
            ("", 502, Unclear),
            ("", 400, Unclear),
        ] {
            assert_eq!(kind(code, status), expected, "{code} {status}");
        }
    }

    #[test]
    fn an_error_says_what_ec2_says() {
        let body = b"<Response><Errors><Error><Code>VcpuLimitExceeded</Code><Message>You have \nrequested more vCPU capacity</Message></Error></Errors></Response>";
        let error = of("can't rent c8i.large", 400, body).error;
        assert_eq!(
            error.message,
            "can't rent c8i.large: over the account's quota: You have requested more vCPU capacity (VcpuLimitExceeded)"
        );
        let error = of("can't rent c8i.large", 502, b"<html>").error;
        assert!(error.message.ends_with("HTTP status 502 without a reason"), "{error}");
    }
}
