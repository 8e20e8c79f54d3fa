#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| perigee_agent::fuzzing::guest_channel(input));
