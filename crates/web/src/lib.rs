//! The pages that people look at: HTML, made of the API's types. No I/O, no clock, no request: the controller asks its API for
//! the one who looks, and answers with what is made here.
//!
//! A page is made of a few parts ([`parts`]), which three templates write. So every text of a user is escaped at one place.
//!
//! Each top-level module is a room, and a room imports only from the floors below its own (`scripts/check-floors`):
//!
//! ```text
//! floors, from the ground up:
//! parts, known
//! words
//! trouble, document, curves
//! lists
//! front
//! job, sites, money
//! things
//! ```
//!
//! | question | file |
//! |---|---|
//! | What is wrong, and what is said of it? | `trouble.rs` |
//! | How are times, sizes and states said? | `words.rs` |
//! | What did a VM do over time? | `curves.rs` |
//! | How does a page stay fresh? | `assets/page.js`; in the controller: `web/live.rs` |
//! | How is a VM's console or screen shown? | `assets/console.js`; the programs of others for that, and their licences: `assets/vendor`, made by `scripts/vendor-web`; in the controller: `web/machine.rs` |

#![warn(missing_docs)]

pub mod curves;
pub mod document;
pub mod front;
pub mod job;
pub mod known;
pub mod lists;
pub mod money;
pub mod parts;
pub mod sites;
pub mod things;
mod trouble;
pub mod words;

#[cfg(test)]
mod tests;

pub use document::{
    CONSOLE, Frame, PageText, SCRIPT, STYLE, TERMINAL, TERMINAL_STYLE, VIEWER, login, render,
    script_path, style_path,
};
