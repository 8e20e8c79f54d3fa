//! The samples of a job in one file of JSON lines. New ones are appended; when older ones are left out, the file is written anew.
//!
//! Nothing after the first bytes counts that are no line. An append is synced only if the caller asks for that: a power cut may cost the last seconds.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use perigee_model::job::Sample;

use super::segments::lines_of;
use super::sync_directory;

/// What a file of samples has.
#[derive(Debug, Default)]
pub struct SampleFile {
    pub samples: Vec<Sample>,
    /// The file has exactly so many bytes; `None` if its end is torn.
    pub length: Option<u64>,
}

/// `None` if there is no file.
pub fn read(path: &Path) -> io::Result<Option<SampleFile>> {
    let text = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    let (mut samples, mut end) = (Vec::new(), 0);
    for (at, sample) in lines_of::<Sample>(&text, true) {
        samples.push(sample);
        end = at;
    }
    let length = (end == text.len()).then_some(end as u64);
    Ok(Some(SampleFile { samples, length }))
}

/// Appends samples to a file of this length. Returns its length afterwards.
pub fn append(path: &Path, length: u64, samples: &[Sample], is_synced: bool) -> io::Result<u64> {
    let text = text_of(samples)?;
    let mut file = File::options().append(true).open(path)?;
    if file.metadata()?.len() != length {
        return Err(io::Error::other(format!("{} was changed meanwhile", path.display())));
    }
    file.write_all(&text)?;
    if is_synced {
        file.sync_data()?;
    }
    Ok(length + text.len() as u64)
}

/// Replaces the file, which is the old or the new one at any time. Returns its length.
pub fn replace(path: &Path, samples: &[Sample]) -> io::Result<u64> {
    let text = text_of(samples)?;
    let unfinished = path.with_extension("new");
    let open =
        File::options().write(true).create(true).truncate(true).mode(0o600).open(&unfinished);
    let mut file = open?;
    file.write_all(&text)?;
    file.sync_all()?;
    fs::rename(&unfinished, path)?;
    path.parent().map_or(Ok(()), sync_directory)?;
    Ok(text.len() as u64)
}

fn text_of(samples: &[Sample]) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    for sample in samples {
        serde_json::to_writer(&mut text, sample)?;
        text.push(b'\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(times: &[u64]) -> Vec<Sample> {
        let sample = |at_ms: &u64| Sample {
            at_ms: *at_ms,
            host: perigee_model::HostId::new("home1").expect("a name"),
            progress: Some(0.25),
            io: Default::default(),
            vcpu_ms: 7,
        };
        times.iter().map(sample).collect()
    }

    fn times(found: &SampleFile) -> Vec<u64> {
        found.samples.iter().map(|sample| sample.at_ms).collect()
    }

    #[test]
    fn wherever_an_append_is_cut_off_whole_samples_are_read_and_the_torn_end_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("samples");
        assert!(read(&path).expect("read").is_none());
        let length = replace(&path, &samples(&[1, 2])).expect("made");
        let end = append(&path, length, &samples(&[3]), false).expect("appended");
        let whole = fs::read(&path).expect("the file");
        assert_eq!(whole.len() as u64, end);
        for at in usize::try_from(length).expect("some bytes")..whole.len() {
            let mut zeros = whole[..at].to_vec();
            zeros.resize(whole.len(), 0);
            for (torn, is_whole) in [(&whole[..at], at as u64 == length), (&zeros[..], false)] {
                fs::write(&path, torn).expect("torn");
                let found = read(&path).expect("read").expect("a file");
                assert_eq!((times(&found), found.length.is_some()), (vec![1, 2], is_whole));
            }
        }
        append(&path, length, &samples(&[3]), true).expect_err("it has another length");
        replace(&path, &samples(&[2, 3])).expect("written anew");
        assert_eq!(times(&read(&path).expect("read").expect("a file")), [2, 3]);
    }
}
