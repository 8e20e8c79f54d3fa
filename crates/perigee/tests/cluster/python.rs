//! The Python client's own tests of what needs no host, over a unix socket and over TLS.

use std::path::Path;
use std::process::Command;

use perigee_http::Authority;

use super::Cluster;

#[test]
fn a_python_program_asks_a_controller_over_its_socket_and_over_tls() {
    let cluster = Cluster::up();
    let (operator, state) = (cluster.path("operator"), cluster.path("state"));
    cluster.ok(&["controller", "operator", &operator, "--state", &state], "");
    cluster.ok(&["user", "add", "default/py", "--role", "admin"], "");
    let token = cluster.ok(&["token", "create", "--user", "default/py", "--life", "1h"], "");
    let fingerprint = Authority::fingerprint_in(&Path::new(&state).join("authority"));
    let client = concat!(env!("CARGO_MANIFEST_DIR"), "/../../clients/python");
    let mut tests = Command::new("python3");
    tests.args(["-m", "unittest", "--verbose", "tests/test_api.py"]).current_dir(client);
    tests.env("PYTHONDONTWRITEBYTECODE", "1").env("PERIGEE_API", &cluster.api);
    tests.env("HOME", cluster.dir.path()).env_remove("XDG_CONFIG_HOME");
    tests.env("PERIGEE_TEST_URL", &cluster.url).env("PERIGEE_TEST_OPERATOR", &operator);
    tests.env("PERIGEE_TEST_TOKEN", token.trim());
    tests.env("PERIGEE_TEST_FINGERPRINT", fingerprint.expect("a fingerprint"));
    let run = tests.output().expect("python3 runs");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}
