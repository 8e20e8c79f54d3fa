//! Curves over the number of clients, the number of volumes, the size of a volume and the depth of its chain.
//! The cost should grow with the work and not with the size.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use perigee_lab::measuring::median;
use perigee_model::volume::{BLOCK_BYTES, VolumeSource};

use crate::goals::{ATTACH_RATIO, CHAIN_RATIO, SIZE_RATIO};
use crate::load::offsets::{Pattern, Random};
use crate::load::{Kind, Load};
use crate::measure::{load_of, observe, record};
use crate::results::{Figure, IOPS, Measurement, Results};
use crate::rounds::Plan;
use crate::servers::{Disk, Fixtures, GOLDEN, Server, Started, Transport, write_once};
use crate::stats::ratio;
use crate::workloads::{WORKLOADS, Workload};

pub const CLIENTS: &str = "over-clients";
pub const VOLUMES: &str = "over-volumes";
pub const SIZE_READ: &str = "over-size-read";
pub const SIZE_WRITE: &str = "over-size-first-touch";
pub const CHAIN: &str = "over-chain-depth";
pub const ATTACH: &str = "attaching a volume, by its size";

const CLIENT_COUNTS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
const VOLUME_COUNTS: [u32; 4] = [1, 4, 16, 64];
const GIB: u64 = 1 << 30;
/// The largest file of ext4 is one block shorter than 16 TiB, so this is the largest volume there.
const SIZES: [u64; 3] = [16 * GIB, 1024 * GIB, 16 * 1024 * GIB - BLOCK_BYTES];
const DEPTHS: [u32; 3] = [1, 8, 32];
const BLOCKS_IN_LARGE: usize = 16 << 10;
/// In a larger image qcow2 writes a table of 64 KiB for nearly every block, which takes minutes.
const QEMU_SIZE_MAX: u64 = 1024 * GIB;
const ROUNDS_MAX: u32 = 2;

pub struct Curves<'a> {
    pub fixtures: &'a Fixtures,
    pub plan: &'a Plan,
}

impl Curves<'_> {
    pub fn run(&self, results: &mut Results, say: impl Fn(&str)) -> Result<()> {
        if self.plan.wants(CHAIN) {
            say("chains of layers");
            for layers in DEPTHS {
                self.fixtures.make_chain(layers)?;
            }
        }
        for round in 0..self.plan.rounds.min(ROUNDS_MAX) {
            for (name, curve) in [
                (CLIENTS, Self::clients as fn(&Self, u32) -> Result<Vec<Measurement>>),
                (VOLUMES, Self::volumes),
                (CHAIN, Self::chain),
            ] {
                if self.plan.wants(name) {
                    say(name);
                    let points = curve(self, round).with_context(|| format!("curve {name}"))?;
                    results.results.extend(points);
                }
            }
        }
        if self.plan.wants(SIZE_READ) {
            say(SIZE_READ);
            self.sizes(results).context("curve over the size of a volume")?;
        }
        results.figures.extend(summary(results));
        Ok(())
    }

    fn short(&self) -> Duration {
        self.plan.duration / 2
    }

    fn point(
        &self,
        name: &str,
        server: Server,
        load: &Load,
        started: &Started,
        (round, at): (u32, f64),
    ) -> Result<Measurement> {
        let (measured, before, after) = observe(load, started.id())?;
        let mut measurement = record(name, server, load, &measured, (before, after));
        measurement.transport = Transport::Unix.word().into();
        measurement.round = round;
        measurement.at = Some(at);
        Ok(measurement)
    }

    /// 1 to 64 clients, each with one request in flight.
    fn clients(&self, round: u32) -> Result<Vec<Measurement>> {
        let workload = read();
        let mut points = Vec::new();
        for server in [Server::Perigee, Server::QEMU, Server::NbdkitCow, Server::Echo] {
            let started = self.fixtures.start(server, workload.disk, Transport::Unix, None)?;
            for clients in CLIENT_COUNTS {
                let mut load = load_of(self.fixtures, &workload, &started, self.short());
                (load.connections, load.depth) = (clients as usize, 1);
                points.push(self.point(
                    CLIENTS,
                    server,
                    &load,
                    &started,
                    (round, clients.into()),
                )?);
            }
            started.stop(self.fixtures)?;
        }
        Ok(points)
    }

    /// 1 to 64 clones, each with its own client.
    fn volumes(&self, round: u32) -> Result<Vec<Measurement>> {
        let mut points = Vec::new();
        let started = self.fixtures.start_pool("pool", Transport::Unix, None)?;
        let control = started.control(self.fixtures, "pool")?;
        for count in VOLUME_COUNTS {
            let names: Vec<String> = (0..count).map(|n| format!("many-{count}-{n}")).collect();
            for name in &names {
                control.create(name, VolumeSource::Image(GOLDEN.parse()?), None)?;
            }
            let mut load = load_of(self.fixtures, &read(), &started, self.short());
            (load.connections, load.depth) = (names.len(), 4);
            load.exports.clone_from(&names);
            let at = (round, count.into());
            points.push(self.point(VOLUMES, Server::Perigee, &load, &started, at)?);
            for name in &names {
                control.delete(name)?;
            }
        }
        started.stop(self.fixtures)?;
        Ok(points)
    }

    fn chain(&self, round: u32) -> Result<Vec<Measurement>> {
        let mut points = Vec::new();
        for layers in DEPTHS {
            for server in [Server::Perigee, Server::QEMU] {
                let disk = Disk::Chain(layers);
                let started = self.fixtures.start(server, disk, Transport::Unix, None)?;
                let load = load_of(self.fixtures, &read(), &started, self.short());
                points.push(self.point(CHAIN, server, &load, &started, (round, layers.into()))?);
                started.stop(self.fixtures)?;
            }
        }
        Ok(points)
    }

    /// Blocks spread over a whole sparse volume are written once and then read.
    #[expect(clippy::cast_precision_loss, reason = "GiB on an axis")]
    fn sizes(&self, results: &mut Results) -> Result<()> {
        for size_bytes in SIZES {
            let mut random = Random::new(5);
            let blocks = size_bytes / BLOCK_BYTES;
            let spread: Vec<u64> = (0..BLOCKS_IN_LARGE).map(|_| random.below(blocks)).collect();
            let spread = Arc::new(spread);
            let at = (size_bytes as f64 / GIB as f64).round();
            let mut servers = vec![Server::Perigee, Server::QEMU];
            servers.retain(|server| *server == Server::Perigee || size_bytes <= QEMU_SIZE_MAX);
            for server in servers {
                let disk = Disk::Large(size_bytes);
                let started = self.fixtures.start(server, disk, Transport::Unix, None)?;
                let began = Instant::now();
                write_once(&started.address, &started.export, 4096, vec![blocks - 1])?;
                results.figures.push(Figure {
                    name: ATTACH.into(),
                    server: server.name(),
                    value: began.elapsed().as_secs_f64() * 1000.0,
                    unit: "ms".into(),
                    at: Some(at),
                });
                let mut load = load_of(self.fixtures, &read(), &started, Duration::from_secs(5));
                load.kind = Kind::Write;
                load.warm_up = Duration::ZERO;
                load.pattern = Pattern::Once(spread.clone());
                results.results.push(self.point(SIZE_WRITE, server, &load, &started, (0, at))?);
                for round in 0..self.plan.rounds.min(ROUNDS_MAX) {
                    let mut load = load_of(self.fixtures, &read(), &started, self.short());
                    load.pattern = Pattern::Among(spread.clone());
                    let point = self.point(SIZE_READ, server, &load, &started, (round, at))?;
                    results.results.push(point);
                }
                started.stop(self.fixtures)?;
            }
        }
        Ok(())
    }
}

fn read() -> Workload {
    WORKLOADS[0]
}

/// The figures of the curves that have goals.
#[expect(clippy::cast_precision_loss, reason = "GiB on an axis")]
fn summary(results: &Results) -> Vec<Figure> {
    let at = |size: u64| Some((size as f64 / GIB as f64).round());
    let (small, large) = (at(SIZES[0]), at(SIZES[2]));
    let iops = |workload: &str, at| results.median_at(workload, "unix", "perigee", at, IOPS);
    let attach = |at: Option<f64>| {
        let of_ours = |f: &&Figure| f.name == ATTACH && f.server == "perigee" && f.at == at;
        let values: Vec<f64> = results.figures.iter().filter(of_ours).map(|f| f.value).collect();
        median(values)
    };
    let of = |ours: Option<f64>, theirs: Option<f64>| ratio(ours?, theirs?);
    let ratios = [
        (SIZE_RATIO, of(iops(SIZE_READ, large), iops(SIZE_READ, small))),
        (ATTACH_RATIO, of(attach(large), attach(small))),
        (CHAIN_RATIO, of(iops(CHAIN, Some(1.0)), iops(CHAIN, Some(32.0)))),
    ];
    let figure = |(name, value): (&str, Option<f64>)| {
        let (name, server) = (name.to_owned(), "perigee".to_owned());
        Some(Figure { name, server, value: value?, unit: "×".into(), at: None })
    };
    ratios.into_iter().filter_map(figure).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::measurement;

    #[test]
    fn ratios_compare_the_ends_of_a_curve() {
        let mut results = Results::default();
        for (depth, iops) in [(1.0, 300.0), (8.0, 200.0), (32.0, 150.0)] {
            let point = measurement(CHAIN, "perigee", "unix", iops);
            results.results.push(Measurement { at: Some(depth), ..point });
        }
        let figures = summary(&results);
        assert_eq!(figures.len(), 1);
        assert_eq!((figures[0].name.as_str(), figures[0].value), (CHAIN_RATIO, 2.0));
    }
}
