//! A certificate authority for one lab, and certificates that it issues to the hosts.

use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use perigee_model::Problem;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

use crate::definition::Definition;

/// Makes `ca.pem`, and `HOST.pem` and `HOST.key` for each host. The authority's key is not stored.
///
/// # Errors
/// When a file can't be written.
pub fn make(dir: &Path, definition: &Definition) -> Result<(), Problem> {
    let what = || format!("can't make the lab's certificates in {}", dir.display());
    let failed = |error: rcgen::Error| Problem::internal(what(), error);
    let write = |name: String, pem: String| {
        let mut options = std::fs::File::options();
        let file = options.write(true).create_new(true).mode(0o600).open(dir.join(name));
        file.and_then(|mut file| std::io::Write::write_all(&mut file, pem.as_bytes()))
            .map_err(|error| Problem::internal(what(), error))
    };
    let key = KeyPair::generate().map_err(failed)?;
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    write("ca.pem".to_owned(), params.self_signed(&key).map_err(failed)?.pem())?;
    let issuer = Issuer::new(params, key);
    for (_, host) in definition.hosts() {
        let key = KeyPair::generate().map_err(failed)?;
        let address = definition.host_address(host).map(|address| address.to_string());
        let names = address.into_iter().collect::<Vec<_>>();
        let params = CertificateParams::new(names).map_err(failed)?;
        write(format!("{host}.pem"), params.signed_by(&key, &issuer).map_err(failed)?.pem())?;
        write(format!("{host}.key"), key.serialize_pem())?;
    }
    Ok(())
}
