//! The key with which the two QEMUs of a migration encrypt what they send.
//!
//! The destination's agent makes a new key for each VM that arrives. Only the agent of the host from which the VM comes
//! gets it, over TLS with certificates on both sides. What encrypts at each end, [`tunnel`](super::tunnel) or QEMU itself (TLS with a
//! pre-shared key), reads it from a file of its VM. So it does not have its host's key, and nobody else can connect to a QEMU
//! that waits for a VM.

use std::path::Path;

use perigee_http::certificate::hex;
use perigee_http::{Peer, PeerIdentity};
use perigee_model::vm::MigrationKey;
use perigee_model::{MigrationId, Problem};
use serde_json::json;

use super::Vm;
use crate::qmp::{Qmp, QmpError};

/// The name of the key in QEMU.
const ID: &str = "migration-tls";

/// An end of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Source,
    Destination,
}

impl End {
    /// The end's name in QEMU's settings and in file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

impl Vm {
    /// Makes the key with which this VM arrives, unless it has one.
    pub fn make_migration_key(&self) -> Result<(), Problem> {
        if self.dir.migration_key()?.is_some() {
            return Ok(());
        }
        let random = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()].map(|id| *id.as_bytes());
        self.dir.keep_migration_key(&MigrationKey { hex: hex(&random.concat()) })
    }

    /// # Errors
    /// `Forbidden` unless the host asks from which this migration comes.
    pub fn migration_key(
        &self,
        peer: &Peer,
        migration: &MigrationId,
    ) -> Result<MigrationKey, Problem> {
        let what = format!("can't give the key of a migration of the VM {}", self.id());
        let is_source = match (peer.identity(), &self.spec.arrives_from) {
            (Some(PeerIdentity::Host(host)), Some(source)) => host == source,
            _ => false,
        };
        if !is_source || self.spec.arrives_by.as_ref() != Some(migration) {
            return Err(Problem::forbidden(what, format!("{peer} does not send it")));
        }
        let key = self.dir.migration_key()?;
        key.ok_or_else(|| Problem::conflict(what, "it does not wait for the migration"))
    }
}

/// Has QEMU encrypt with the key in this directory, or not at all.
pub async fn set_encryption(qmp: &Qmp, end: End, dir: Option<&Path>) -> Result<(), QmpError> {
    let id = match dir {
        None => "",
        Some(dir) => {
            // An earlier migration had another key. Without one QEMU refuses this.
            if let Err(error) = qmp.execute("object-del", json!({"id": ID})).await {
                tracing::debug!(%error, "no earlier key of a migration");
            }
            let endpoint = if end == End::Source { "client" } else { "server" };
            let dir = dir.display().to_string();
            let key =
                json!({"qom-type": "tls-creds-psk", "id": ID, "dir": dir, "endpoint": endpoint});
            qmp.execute("object-add", key).await?;
            ID
        }
    };
    qmp.execute("migrate-set-parameters", json!({"tls-creds": id})).await.map(drop)
}

#[cfg(test)]
mod hostile;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    use perigee_http::Certified;
    use perigee_model::vm::{VmSpec, VmStatus};
    use perigee_model::{HostId, ProblemKind, VmId, VmStart};

    use super::*;
    use crate::changes::Changes;
    use crate::files::VmDir;
    use crate::guest::GuestLog;
    use crate::vm::since::Since;

    fn host(name: &str) -> Peer {
        let identity = PeerIdentity::Host(HostId::new(name).unwrap());
        Peer::Known(Certified { identity, issued_ms: 0 })
    }

    fn migration(id: &str) -> MigrationId {
        MigrationId::new(id).unwrap()
    }

    fn vm(dir: &Path) -> Arc<Vm> {
        let spec = VmSpec {
            vm: VmId::new("vm-1").unwrap(),
            start: VmStart::default(),
            cpus: 1,
            memory_bytes: 64 << 20,
            disks: Vec::new(),
            arrives_by: Some(migration("m-1")),
            arrives_from: Some(HostId::new("home1").unwrap()),
            arrives_compressed: false,
            arrives_tunnelled: false,
            locks_memory: false,
            hides_output: false,
            network: Default::default(),
            machine: Default::default(),
        };
        let vm_dir = VmDir::new(dir, &spec.vm);
        std::fs::create_dir_all(vm_dir.run()).unwrap();
        let log = GuestLog::open(&vm_dir.events(), false).unwrap();
        let changes = Arc::new(Changes::new());
        Vm::new(spec, vm_dir, Since::default(), log, VmStatus::Incoming, &changes).0
    }

    #[test]
    fn the_key_of_a_migration_is_for_the_host_from_which_the_vm_comes() {
        let dir = tempfile::tempdir().unwrap();
        let vm = vm(dir.path());
        let early = vm.migration_key(&host("home1"), &migration("m-1")).err().unwrap();
        assert_eq!(early.kind, ProblemKind::Conflict, "{early}");
        vm.make_migration_key().unwrap();
        let key = vm.migration_key(&host("home1"), &migration("m-1")).ok().unwrap();
        assert!(key.is_one());
        vm.make_migration_key().unwrap();
        let again = vm.migration_key(&host("home1"), &migration("m-1")).ok().unwrap();
        assert!(again == key, "QEMU has read it already");
        let controller = PeerIdentity::Controller;
        let controller = Peer::Known(Certified { identity: controller, issued_ms: 0 });
        for (peer, id) in [
            (host("cloud1"), "m-1"),
            (host("home1"), "m-2"),
            (controller, "m-1"),
            (Peer::Stranger, "m-1"),
            (Peer::NotKnown, "m-1"),
        ] {
            let refused = vm.migration_key(&peer, &migration(id)).err().unwrap();
            assert_eq!(refused.kind, ProblemKind::Forbidden, "{peer} {id}: {refused}");
        }
    }

    #[test]
    fn the_key_of_a_migration_is_in_a_file_for_qemu_alone() {
        let dir = tempfile::tempdir().unwrap();
        let vm = vm(dir.path());
        vm.make_migration_key().unwrap();
        for file in ["keys.psk", "dh-params.pem"] {
            let mode = std::fs::metadata(vm.dir.tls().join(file)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
        let odd = MigrationKey { hex: format!("{}\nqemu:00", "0".repeat(MigrationKey::DIGITS)) };
        vm.dir.keep_migration_key(&odd).expect_err("it is no key");
    }
}
