//! What the guest does: it serves a page and a large file with nginx, and has an SSH server. It is the same for both systems.

/// The guest writes this to its serial console when its servers answer.
pub const READY: &str = "perigee-reachable: ready";

pub const PAGE: &str = "page";
pub const LARGE: &str = "large";
pub const LARGE_BYTES: u64 = 1 << 30;
pub const HTTP_PORT: u16 = 80;
pub const SSH_PORT: u16 = 22;

/// `key`: the public key that may log in as root.
pub fn command(key: &str) -> Vec<String> {
    let script = format!(
        "set -e
mkdir -p /root/.ssh /run/sshd /srv/www; chmod 700 /root/.ssh
echo '{key}' > /root/.ssh/authorized_keys
head -c 1024 /dev/urandom > /srv/www/{PAGE}
truncate -s {LARGE_BYTES} /srv/www/{LARGE}
cat > /tmp/nginx.conf <<'END'
worker_processes 1;
error_log /dev/null;
pid /tmp/nginx.pid;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; default_type application/octet-stream;
  client_body_temp_path /tmp/body; proxy_temp_path /tmp/proxy;
  server {{ listen {HTTP_PORT}; root /srv/www; }}
}}
END
ssh-keygen -A
/usr/sbin/sshd -o PermitRootLogin=yes -o UsePAM=no
/usr/sbin/nginx -c /tmp/nginx.conf
echo '{READY}' > /dev/console
exec sleep 1000000
"
    );
    vec!["/bin/sh".to_owned(), "-c".to_owned(), script]
}
