//! What each endless task of the controller did last, when, how long that took, and at what it failed.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use perigee_model::Problem;
use perigee_model::tasks::{TaskFailure, TaskStatus};

use crate::clock::now_ms;

/// The status of each task, by its name.
#[derive(Debug, Default)]
pub struct Tasks(Mutex<BTreeMap<&'static str, TaskStatus>>);

impl Tasks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, TaskStatus>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All tasks, sorted by their names.
    pub fn all(&self) -> Vec<TaskStatus> {
        self.lock().values().cloned().collect()
    }
}

/// What a panic says.
pub fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}

/// By this a task reports what it does.
#[derive(Debug, Clone)]
pub struct Task {
    tasks: Arc<Tasks>,
    name: &'static str,
}

impl Task {
    /// The task of this name, which is in the list from now on.
    pub fn new(tasks: &Arc<Tasks>, name: &'static str) -> Self {
        let task = Self { tasks: Arc::clone(tasks), name };
        task.note(|_| {});
        task
    }

    fn note(&self, note: impl FnOnce(&mut TaskStatus)) {
        let mut all = self.tasks.lock();
        let new = || TaskStatus { name: self.name.to_owned(), ..TaskStatus::default() };
        note(all.entry(self.name).or_insert_with(new));
    }

    /// Does one round. It says in words what it did, or why it failed, which the log says too when it is new.
    pub async fn round(&self, work: impl Future<Output = Result<String, Problem>>) {
        let begun = Instant::now();
        self.note(|status| status.busy_since_ms = Some(now_ms()));
        let done = work.await;
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        match done {
            Ok(did) => self.note(|status| {
                end(status, took_ms);
                status.did = did;
                status.problem.clear();
            }),
            Err(problem) => {
                let why = problem.to_string();
                let mut is_new = true;
                self.note(|status| is_new = status.problem != why);
                if is_new {
                    tracing::warn!("{} failed: {why}", self.name);
                } else {
                    tracing::debug!("{} failed again: {why}", self.name);
                }
                self.failed(took_ms, why);
            }
        }
    }

    /// A panic ended the task in its round.
    pub fn panicked(&self, text: &str) {
        let mut took_ms = 0;
        self.note(|status| {
            took_ms = now_ms().saturating_sub(status.busy_since_ms.unwrap_or_else(now_ms));
        });
        self.failed(took_ms, format!("a fault in the controller: {text}"));
    }

    fn failed(&self, took_ms: u64, why: String) {
        self.note(|status| {
            end(status, took_ms);
            status.failures += 1;
            status.did.clear();
            status.problem.clone_from(&why);
            status.last_failure = Some(TaskFailure { at_ms: now_ms(), why });
        });
    }
}

fn end(status: &mut TaskStatus, took_ms: u64) {
    status.rounds += 1;
    status.busy_since_ms = None;
    status.ended_ms = Some(now_ms());
    status.took_ms = took_ms;
}
