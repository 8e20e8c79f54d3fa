//! Archives as they should be, and as somebody who means harm writes them.

use super::*;

pub fn tar_of(entries: &[(&str, tar::EntryType)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, kind) in entries {
        let mut header = tar::Header::new_gnu();
        // Straight into the field: the builder would refuse what is tested here.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.set_entry_type(*kind);
        header.set_uid(1234);
        header.set_mode(0o4755);
        header.set_size(if kind.is_file() { 2 } else { 0 });
        header.set_cksum();
        let data: &[u8] = if kind.is_file() { b"hi" } else { b"" };
        builder.append(&header, data).expect("append");
    }
    builder.into_inner().expect("tar")
}

fn seed() -> Seed {
    Seed {
        job: "j-0001".into(),
        command: vec!["true".into()],
        env: Default::default(),
        mounts: Vec::new(),
        outputs: Vec::new(),
        timeout_s: None,
        output_bytes: None,
        stop_grace_s: perigee_model::job::STOP_GRACE_S_DEFAULT,
        network: None,
        gang: None,
        collect: false,
    }
}

#[test]
fn a_seed_is_the_job_of_root() {
    let seed = write_seed(Vec::new(), &seed()).expect("seed");
    let mut archive = tar::Archive::new(&seed[..]);
    let mut entries = archive.entries().expect("entries");
    let entry = entries.next().expect("one").expect("entry");
    assert_eq!(entry.path().expect("path").to_str(), Some("job.json"));
    assert_eq!(entry.header().uid().expect("uid"), 0);
    drop(entry);
    assert!(entries.next().is_none());
}

/// A long name as GNU tar writes it, as an entry of its own before the file.
fn long_name(bytes: usize) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_path("././@LongLink").expect("a short path");
    header.set_entry_type(tar::EntryType::GNULongName);
    header.set_size(bytes as u64);
    header.set_cksum();
    builder.append(&header, &vec![b'n'; bytes][..]).expect("append");
    let mut tar = builder.into_inner().expect("tar");
    tar.truncate(tar.len() - 1024);
    tar.extend(tar_of(&[("f", tar::EntryType::Regular)]));
    tar
}

#[test]
fn names_are_bounded_before_they_are_read_into_memory() {
    check_output(&long_name(1000)[..]).expect("a long name");
    let refused = check_output(&long_name(1 << 20)[..]).expect_err("an endless name");
    assert!(refused.to_string().contains("65536 bytes"), "{refused}");
}

#[test]
fn a_sparse_file_that_claims_to_be_huge_is_refused_before_it_is_read() {
    let mut header = tar::Header::new_gnu();
    header.set_path("huge").expect("path");
    header.set_entry_type(tar::EntryType::GNUSparse);
    header.set_size(0);
    let gnu = header.as_gnu_mut().expect("GNU");
    gnu.realsize[..12].copy_from_slice(b"777777777777");
    header.set_cksum();
    let mut builder = tar::Builder::new(Vec::new());
    builder.append(&header, &b""[..]).expect("append");
    let tar = builder.into_inner().expect("tar");
    check_output(&tar[..]).expect_err("it is no plain file");
}

#[test]
fn too_many_entries_are_refused() {
    let many = tar_of(&[("f", tar::EntryType::Regular); 20]);
    let counted = for_each_entry(&many[..], 10, |_| Ok(())).expect_err("20 are too many");
    assert!(counted.to_string().contains("10 entries"), "{counted}");
}
