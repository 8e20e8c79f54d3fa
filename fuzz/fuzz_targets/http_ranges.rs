#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| perigee_repository::fuzzing::ranges(input));
