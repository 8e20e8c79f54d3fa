//! User-data of a VM, as cloud-init reads it: what cloud-init would ignore without a word is refused, with what to write instead.

use std::io::Read as _;

use flate2::read::MultiGzDecoder;
use perigee_model::Problem;
use perigee_model::limits::USER_DATA_BYTES;
use perigee_model::yaml::Document;

/// The first bytes of a gzip file (RFC 1952, 2.3.1).
const GZIP: [u8; 3] = [0x1f, 0x8b, 8];

/// How cloud-init tells kinds of user-data apart, in lower case (`INCLUSION_TYPES_MAP` there).
const KINDS: [&str; 9] = [
    "#!",
    "#cloud-config",
    "#include",
    "#include-once",
    "#cloud-boothook",
    "#part-handler",
    "#cloud-config-archive",
    "#cloud-config-jsonp",
    "## template: jinja",
];

/// A message in parts, each with a kind of its own, names its format at its begin.
const PARTS: [&str; 2] = ["mime-version:", "content-type:"];

/// Errors call it so.
const NAME: &str = "user-data";

/// The text of a file with user-data, which may be compressed with gzip.
///
/// # Errors
/// `Invalid` when it is no text, or too long.
pub fn text_of(bytes: &[u8]) -> Result<String, Problem> {
    let what = "can't use the user-data";
    let mut text = Vec::new();
    let limit = u64::try_from(USER_DATA_BYTES.max).unwrap_or(u64::MAX);
    let read = match bytes.starts_with(&GZIP) {
        true => MultiGzDecoder::new(bytes).take(limit + 1).read_to_end(&mut text),
        false => bytes.take(limit + 1).read_to_end(&mut text),
    };
    read.map_err(|e| {
        Problem::invalid(what, format!("it is compressed with gzip and damaged: {e}"))
    })?;
    USER_DATA_BYTES.check(text.len()).map_err(|error| {
        error
            .problem(what)
            .next("put what is large where the guest can fetch it, and name that with `#include`")
    })?;
    String::from_utf8(text).map_err(|_| {
        Problem::invalid(what, "it is no text")
            .next("cloud-init reads UTF-8, plain or compressed with gzip")
    })
}

/// # Errors
/// `Invalid` when cloud-init would ignore it, or not understand it.
pub fn check(text: &str) -> Result<(), Problem> {
    let what = "can't use the user-data";
    let refused = |why: &str, next: &str| Err(Problem::invalid(what, why).next(next));
    if text.starts_with('\u{feff}') {
        let why = "it begins with a byte order mark, and cloud-init would ignore all of it";
        return refused(why, "write it without: sed -i '1s/^\\xEF\\xBB\\xBF//' FILE");
    }
    let begin = text.trim_start().to_lowercase();
    let is_known = KINDS.iter().any(|kind| begin.starts_with(kind));
    let has_parts = PARTS.iter().any(|kind| begin.starts_with(kind));
    if !is_known && !has_parts {
        let why = "its first line is none that cloud-init knows, so it would ignore all of it";
        let first = begin.lines().next().unwrap_or_default();
        let squeezed: String = first.chars().filter(|c| !c.is_whitespace()).collect();
        let next = match squeezed.starts_with("#cloud-config") {
            true => "write the first line as `#cloud-config`, without spaces",
            false => {
                "begin it with the line `#cloud-config` (YAML), or with `#!/bin/sh` (a script)"
            }
        };
        return refused(why, next);
    }
    if text.trim_start().len() != text.len() && begin.starts_with("#!") {
        return refused(
            "a script's `#!` has to be its very first characters",
            "remove what is before it",
        );
    }
    if begin.starts_with("#!") && begin.lines().next().is_some() && has_windows_lines(text) {
        let why = "the script has the line ends of Windows (CR LF), with which it can't run";
        return refused(why, "convert it: sed -i 's/\\r$//' FILE");
    }
    match begin.lines().next().map(str::trim_end) {
        Some("#cloud-config") => check_config(text),
        Some("#cloud-config-archive") => check_yaml(text),
        _ => Ok(()),
    }
}

fn has_windows_lines(text: &str) -> bool {
    text.split('\n').next().is_some_and(|line| line.ends_with('\r'))
}

/// cloud-init logs that it can't read a config, and goes on without.
fn check_config(text: &str) -> Result<(), Problem> {
    let document = parse(text)?;
    let root = document.root();
    if root.is_null() || root.is_map() {
        return Ok(());
    }
    let problem =
        root.problem("a cloud-config has lines `name: value`, and this is something else");
    Err(problem.next("see https://cloudinit.readthedocs.io/en/latest/reference/examples.html"))
}

fn check_yaml(text: &str) -> Result<(), Problem> {
    parse(text).map(drop)
}

fn parse(text: &str) -> Result<Document<'_>, Problem> {
    Document::parse_as_others_do(NAME, text)
        .map_err(|problem| problem.next("cloud-init would ignore all of it: mend the YAML"))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn what_cloud_init_would_ignore_is_refused_with_what_to_write() {
        for (text, next) in [
            ("packages: [git]\n", "#cloud-config"),
            ("# cloud-config\npackages: [git]\n", "without spaces"),
            ("\u{feff}#cloud-config\n{}\n", "sed"),
            ("#cloud-config\npackages: [git\nruncmd: x\n", "mend the YAML"),
            ("#cloud-config\n- git\n", "examples"),
            ("#!/bin/sh\r\necho\r\n", "sed"),
            ("\n#!/bin/sh\necho\n", "before it"),
            ("hello\n", "#cloud-config"),
        ] {
            let problem = check(text).expect_err(text);
            assert!(problem.next.contains(next), "{text:?}: {problem}");
        }
        let problem = check("#cloud-config\na: 1\n\tb: 2\n").expect_err("a tab");
        assert!(problem.what.starts_with("user-data:3"), "{problem}");
    }

    #[test]
    fn what_cloud_init_takes_is_taken() {
        for text in [
            "#cloud-config\n",
            "#cloud-config\n{}\n",
            "#cloud-config\r\npackages: [git]\r\n",
            "#cloud-config\na: 1\na: 2\n",
            "#cloud-config\nx: &a [1]\ny: *a\nz: !!binary H4sIAIDb\nw: 0644\n",
            "#!/bin/sh\necho hi\n",
            "#include\nhttps://example.org/x\n",
            "## template: jinja\n#cloud-config\n{% if x %}\na: {{ v1 }}\n{% endif %}\n",
            "Content-Type: multipart/mixed; boundary=\"b\"\nMIME-Version: 1.0\n\n--b\n",
            "#cloud-config-archive\n- type: text/cloud-config\n  content: |\n    a: 1\n",
        ] {
            check(text).expect(text);
        }
    }

    #[test]
    fn compressed_user_data_is_unpacked_as_far_as_the_limit() {
        let packed = |text: &[u8]| {
            let mut encoder =
                flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(text).expect("memory");
            encoder.finish().expect("memory")
        };
        assert_eq!(text_of(&packed(b"#cloud-config\n{}\n")).as_deref(), Ok("#cloud-config\n{}\n"));
        assert_eq!(text_of(b"#!/bin/sh\n").as_deref(), Ok("#!/bin/sh\n"));
        let bomb = text_of(&packed(&vec![b'x'; 64 << 20])).expect_err("it is too long");
        assert!(bomb.why.contains("length of user-data"), "{bomb}");
        let cut = packed(b"#cloud-config\n{}\n");
        assert!(text_of(&cut[..cut.len() - 9]).expect_err("it is cut").why.contains("damaged"));
        assert!(text_of(&[0xff, 0xfe]).expect_err("no text").why.contains("no text"));
    }
}
