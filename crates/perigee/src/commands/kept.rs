//! `perigee rent kept`

use perigee_http::Client;
use perigee_model::Problem;
use perigee_model::kept::{KeptDisk, KeptReplica};

use crate::output::{self, Column, Format};

const KEPT: &[Column<KeptDisk>] = &[
    ("rental", |k| k.id.to_string()),
    ("provider", |k| k.provider.clone()),
    ("site", |k| k.site.to_string()),
    ("state", |k| k.state.to_string()),
    ("volumes", |k| k.volumes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    ("stored", |k| output::bytes(k.stored_bytes)),
    ("a month", |k| k.monthly().to_string()),
    ("since", |k| k.kept_ms.map_or_else(|| "-".to_owned(), output::time)),
    ("used by", |k| output::or_dash(k.used_by.as_ref())),
    ("reserved", |k| k.reserved.to_string()),
    ("spent", |k| k.spent.unwrap_or_default().to_string()),
    ("why", |k| k.why.clone()),
];

/// Lists the disks that are kept; with `all` also those that were kept lately.
///
/// # Errors
/// As the controller says.
pub async fn list(client: &Client, all: bool, format: Format) -> Result<(), Problem> {
    let mut disks: Vec<KeptDisk> = client.get("/v1/kept-disks").await?;
    disks.retain(|kept| all || !kept.state.is_over());
    output::list(format, &disks, KEPT)
}

/// `kept as a snapshot at ec2, $0.02 a month, since …`.
pub fn in_words(kept: &KeptReplica) -> String {
    let KeptReplica { provider, since_ms, monthly } = kept;
    match since_ms {
        Some(since_ms) => {
            let since = output::time(*since_ms);
            format!("kept as a snapshot at {provider}, {monthly} a month, since {since}")
        }
        None => format!("is about to be kept as a snapshot at {provider}"),
    }
}

#[cfg(test)]
mod tests {
    use perigee_model::money::Money;

    use super::*;

    #[test]
    fn what_is_kept_is_said_with_its_price() {
        let kept = KeptReplica {
            provider: "ec2".to_owned(),
            since_ms: Some(0),
            monthly: Money::from_micros(20_000),
        };
        let said = in_words(&kept);
        assert!(said.starts_with("kept as a snapshot at ec2, $0.02 a month, since 1970"), "{said}");
        let soon = in_words(&KeptReplica { since_ms: None, ..kept });
        assert_eq!(soon, "is about to be kept as a snapshot at ec2");
    }
}
