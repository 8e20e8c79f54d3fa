//! `perigee lab`
