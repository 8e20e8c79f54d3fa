//! Whether the kernel confines QEMU further than its user and its filter of system calls do.
//!
//! Perigee sets up neither AppArmor nor Landlock. An administrator may run the agent in an AppArmor profile, and QEMU then
//! runs in it too.

const PROFILE: &str = "/proc/self/attr/apparmor/current";
const ENABLED: &str = "/sys/module/apparmor/parameters/enabled";

/// In plain words, for `perigee host info`, if nothing does.
pub fn missing() -> Option<String> {
    let enabled = std::fs::read_to_string(ENABLED).is_ok_and(|text| text.trim() == "Y");
    describe(enabled, std::fs::read_to_string(PROFILE).ok().as_deref())
}

/// The kernel says `PROFILE (MODE)`, or `unconfined`.
fn describe(enabled: bool, profile: Option<&str>) -> Option<String> {
    if let Some(name) = profile.and_then(|text| text.trim().strip_suffix(" (enforce)")) {
        tracing::info!(profile = name, "AppArmor confines QEMU");
        return None;
    }
    let why = if enabled {
        "the agent runs in no AppArmor profile that is enforced"
    } else {
        "the kernel has no AppArmor"
    };
    Some(format!("neither AppArmor nor Landlock confines QEMU: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_profile_that_is_enforced_confines() {
        assert_eq!(describe(true, Some("perigee (enforce)\n")), None);
        for free in ["unconfined\n", "perigee (complain)\n"] {
            assert!(describe(true, Some(free)).is_some_and(|text| text.contains("AppArmor")));
        }
        assert!(describe(false, None).is_some_and(|text| text.contains("no AppArmor")));
    }
}
