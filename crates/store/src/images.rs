//! How images are made: from files, from what `qemu-img` reads, and from directories.
//!
//! | what | file |
//! |---|---|
//! | an import from its source to the catalog | `import.rs` |
//! | files of a directory become an image | `dir_images.rs` |
//! | `qemu-img` and `mke2fs` as users without rights | `qemu_img.rs` |
//! | whether such a program gets on | `progress.rs` |

pub(crate) mod dir_images;
pub(crate) mod import;
pub(crate) mod progress;
pub(crate) mod qemu_img;
