//! Turns a request frame into a command or a refusal. These are pure functions.

use perigee_block::device::{Zeroing, is_within};
use perigee_block::lease::LeaseAsk;
use perigee_model::volume::BLOCK_BYTES;

use super::super::wire::{
    Dialect, Errno, PAYLOAD_BYTES_MAX, Request, command, command_flag, lease_ask,
};
use super::contexts::{self, Contexts};

/// The limit of one CACHE request. It is only a hint, and must not keep a disk busy.
const CACHE_BYTES_MAX: u64 = 64 << 20;

/// A valid request: its range is within the export, and it is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// `compressed`: the answer may be compressed.
    Read {
        offset: u64,
        length_bytes: u32,
        compressed: bool,
    },
    Write {
        offset: u64,
        fua: bool,
    },
    Flush,
    Zero {
        offset: u64,
        length_bytes: u64,
        how: Zeroing,
        fua: bool,
    },
    Status {
        offset: u64,
        length_bytes: u64,
        only_one: bool,
        contexts: Contexts,
    },
    Cache {
        offset: u64,
        length_bytes: u64,
    },
    Lease(LeaseAsk),
}

/// The rules of this connection, on which a refusal depends.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub read_only: bool,
    pub dialect: Dialect,
    pub contexts: Contexts,
}

/// The error to answer with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub errno: Errno,
    pub message: String,
}

fn refuse<T>(errno: Errno, message: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { errno, message: message.into() })
}

/// `size_bytes` is the export's size at this moment.
pub fn check(request: &Request, rules: &Rules, size_bytes: u64) -> Result<Command, Refusal> {
    check_flags(request, rules)?;
    let Request { offset, length_bytes, .. } = *request;
    let fua = request.flags & command_flag::FUA != 0;
    match request.command {
        command::READ => {
            check_range(request, size_bytes, Errno::Invalid)?;
            match u32::try_from(length_bytes) {
                Ok(length_bytes) if length_bytes <= PAYLOAD_BYTES_MAX => {
                    let compressed = request.flags & command_flag::PERIGEE_COMPRESS != 0;
                    Ok(Command::Read { offset, length_bytes, compressed })
                }
                _ => {
                    let message = format!("a read of {length_bytes} bytes is too long");
                    refuse(Errno::Invalid, message)
                }
            }
        }
        command::WRITE => {
            check_change(request, rules, size_bytes)?;
            Ok(Command::Write { offset, fua })
        }
        command::FLUSH => Ok(Command::Flush),
        command::TRIM => {
            check_change(request, rules, size_bytes)?;
            Ok(Command::Zero { offset, length_bytes, how: Zeroing::FreeSpace, fua })
        }
        command::WRITE_ZEROES => {
            check_change(request, rules, size_bytes)?;
            check_fast(request, size_bytes)?;
            let keep = request.flags & command_flag::NO_HOLE != 0;
            let how = if keep { Zeroing::KeepSpace } else { Zeroing::FreeSpace };
            Ok(Command::Zero { offset, length_bytes, how, fua })
        }
        command::BLOCK_STATUS => {
            let contexts = rules.contexts;
            if contexts.is_empty() || length_bytes == 0 {
                return refuse(Errno::Invalid, "no context was chosen, or the range is empty");
            }
            check_range(request, size_bytes, Errno::Invalid)?;
            let only_one = request.flags & command_flag::REQ_ONE != 0;
            let length_bytes = contexts::cut(length_bytes, rules.dialect);
            Ok(Command::Status { offset, length_bytes, only_one, contexts })
        }
        command::CACHE => {
            check_range(request, size_bytes, Errno::Invalid)?;
            Ok(Command::Cache { offset, length_bytes: length_bytes.min(CACHE_BYTES_MAX) })
        }
        command::PERIGEE_LEASE => match (lease_ask(offset), length_bytes) {
            (Some(ask), 1) => Ok(Command::Lease(ask)),
            _ => refuse(Errno::Invalid, "a question about a lease that nobody knows"),
        },
        other => refuse(Errno::Invalid, format!("unknown command {other}")),
    }
}

fn check_flags(request: &Request, rules: &Rules) -> Result<(), Refusal> {
    // The protocol requires that FUA is accepted and ignored for commands where it means nothing.
    let allowed = command_flag::FUA
        | match request.command {
            command::READ if rules.dialect != Dialect::Simple => {
                let compress =
                    if rules.contexts.compression { command_flag::PERIGEE_COMPRESS } else { 0 };
                command_flag::DF | compress
            }
            command::WRITE if rules.dialect == Dialect::Extended => command_flag::PAYLOAD_LEN,
            command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
            command::BLOCK_STATUS => command_flag::REQ_ONE,
            _ => 0,
        };
    if request.flags & !allowed != 0 {
        let message =
            format!("command {} does not allow the flags {:#x}", request.command, request.flags);
        return refuse(Errno::Invalid, message);
    }
    Ok(())
}

fn check_range(request: &Request, size_bytes: u64, beyond: Errno) -> Result<(), Refusal> {
    let Request { offset, length_bytes, .. } = *request;
    if !is_within(size_bytes, offset, length_bytes) {
        let message =
            format!("{length_bytes} bytes at {offset} are beyond the export's end at {size_bytes}");
        return refuse(beyond, message);
    }
    Ok(())
}

fn check_change(request: &Request, rules: &Rules, size_bytes: u64) -> Result<(), Refusal> {
    if rules.read_only {
        return refuse(Errno::Perm, "the export is read-only");
    }
    // As the protocol says: no space for more data, and nothing there to be trimmed.
    let beyond = if request.command == command::TRIM { Errno::Invalid } else { Errno::NoSpace };
    check_range(request, size_bytes, beyond)
}

/// FAST_ZERO is possible for whole blocks only, which need only a change of the map. A partial block has to
/// be read and written.
fn check_fast(request: &Request, size_bytes: u64) -> Result<(), Refusal> {
    let end = request.offset + request.length_bytes;
    let whole = request.offset.is_multiple_of(BLOCK_BYTES)
        && (end.is_multiple_of(BLOCK_BYTES) || end == size_bytes);
    if request.flags & command_flag::FAST_ZERO != 0 && !whole {
        return refuse(Errno::NotSupported, "zeroing parts of blocks is not faster than writing");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE_BYTES: u64 = 1 << 20;

    fn rules() -> Rules {
        Rules { read_only: false, dialect: Dialect::Structured, contexts: Contexts::all() }
    }

    fn request(command: u16, flags: u16, offset: u64, length_bytes: u64) -> Request {
        Request { flags, command, cookie: 0, offset, length_bytes }
    }

    fn refused(request: Request, rules: Rules) -> Errno {
        check(&request, &rules, SIZE_BYTES).expect_err("it must be refused").errno
    }

    #[test]
    fn a_request_that_ends_at_the_end_is_allowed() {
        let read = request(command::READ, 0, (1 << 20) - 512, 512);
        assert_eq!(
            check(&read, &rules(), SIZE_BYTES),
            Ok(Command::Read { offset: (1 << 20) - 512, length_bytes: 512, compressed: false })
        );
    }

    #[test]
    fn beyond_the_end_there_is_no_space_to_write_and_nothing_to_read_or_trim() {
        for (command, errno) in [
            (command::WRITE, Errno::NoSpace),
            (command::WRITE_ZEROES, Errno::NoSpace),
            (command::TRIM, Errno::Invalid),
            (command::READ, Errno::Invalid),
            (command::CACHE, Errno::Invalid),
        ] {
            assert_eq!(refused(request(command, 0, 1 << 20, 1), rules()), errno, "{command}");
        }
    }

    #[test]
    fn an_offset_that_overflows_is_refused() {
        assert_eq!(refused(request(command::TRIM, 0, u64::MAX, 2), rules()), Errno::Invalid);
    }

    #[test]
    fn a_read_only_export_takes_no_change_but_a_flush() {
        let rules = Rules { read_only: true, ..rules() };
        for change in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(refused(request(change, 0, 0, 512), rules), Errno::Perm);
        }
        assert_eq!(
            check(&request(command::FLUSH, 0, 0, 0), &rules, SIZE_BYTES),
            Ok(Command::Flush)
        );
    }

    #[test]
    fn no_hole_keeps_the_space() {
        let zero = request(command::WRITE_ZEROES, command_flag::NO_HOLE, 0, 4096);
        let want =
            Command::Zero { offset: 0, length_bytes: 4096, how: Zeroing::KeepSpace, fua: false };
        assert_eq!(check(&zero, &rules(), SIZE_BYTES), Ok(want));
    }

    #[test]
    fn a_flag_that_was_not_offered_is_refused() {
        let unknown = 1 << 9;
        assert_eq!(
            refused(request(command::WRITE_ZEROES, unknown, 0, 512), rules()),
            Errno::Invalid
        );
    }

    #[test]
    fn zeroing_is_fast_for_whole_blocks_only() {
        let fast = |offset, length| {
            request(command::WRITE_ZEROES, command_flag::FAST_ZERO, offset, length)
        };
        assert!(check(&fast(4096, 8192), &rules(), SIZE_BYTES).is_ok());
        assert!(check(&fast(4096, 8192 + 512), &rules(), 4096 + 8192 + 512).is_ok());
        assert_eq!(refused(fast(512, 8192), rules()), Errno::NotSupported);
        assert_eq!(refused(fast(0, 4097), rules()), Errno::NotSupported);
    }

    #[test]
    fn a_request_to_cache_everything_is_cut() {
        let all = request(command::CACHE, 0, 0, 1 << 40);
        let want = Command::Cache { offset: 0, length_bytes: CACHE_BYTES_MAX };
        assert_eq!(check(&all, &rules(), 1 << 40), Ok(want));
    }

    #[test]
    fn an_extended_write_may_leave_out_that_it_has_a_payload() {
        let rules = Rules { dialect: Dialect::Extended, ..rules() };
        for flags in [0, command_flag::PAYLOAD_LEN] {
            let write = request(command::WRITE, flags, 0, 512);
            let want = Command::Write { offset: 0, fua: false };
            assert!(write.has_payload(Dialect::Extended));
            assert_eq!(check(&write, &rules, SIZE_BYTES), Ok(want));
        }
    }

    #[test]
    fn a_read_of_more_than_32_bits_is_refused() {
        let long = request(command::READ, 0, 0, 1 << 33);
        let error = check(&long, &rules(), 1 << 40).expect_err("it must be refused");
        assert_eq!(error.errno, Errno::Invalid);
    }

    #[test]
    fn a_status_needs_the_context() {
        let rules = Rules { contexts: Contexts::default(), ..rules() };
        assert_eq!(refused(request(command::BLOCK_STATUS, 0, 0, 512), rules), Errno::Invalid);
    }
}
