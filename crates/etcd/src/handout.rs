//! A file in the shared store with which the other machines reach a local etcd.
//!
//! Whoever can read it can write to the coordinator, and so decide what is restored. So only its owner can read it, and
//! a reader refuses a file that another user may have written.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rekindle_os::durable::{Place, write_file};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::options::{Options, Secret};

/// The only format so far.
const FORMAT: u32 = 1;

/// The size limit: our files are smaller.
const MOST: u64 = 1 << 20;

/// The address of a local etcd, and the keys to it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handout {
    format: u32,
    /// The address at which it listens.
    pub endpoints: Vec<String>,
    ca: String,
    certificate: String,
    key: String,
}

impl std::fmt::Debug for Handout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handout").field("endpoints", &self.endpoints).finish_non_exhaustive()
    }
}

/// The certificate and the key of the server, as PEM.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Server {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Handout {
    /// Makes new keys for clients of an etcd at this address, and for the server. An authority signs both. Its key is
    /// not kept, so nobody can make others.
    pub(crate) fn new(endpoint: String, host: &str) -> Result<(Handout, Server)> {
        let failed = |error: rcgen::Error| Error::Local(format!("cannot make certificates for {host}: {error}"));
        let named = |name: &str, hosts: &[&str]| -> Result<CertificateParams> {
            let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
            // Valid at any time: the machines' clocks may be wrong, and the keys are used only for this run.
            let mut params = CertificateParams::new(hosts).map_err(failed)?;
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::CommonName, name);
            Ok(params)
        };
        let mut ca = named("rekindle local etcd", &[])?;
        ca.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        ca.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let ca_key = KeyPair::generate().map_err(failed)?;
        let ca_certificate = ca.self_signed(&ca_key).map_err(failed)?;
        let issuer = Issuer::from_params(&ca, &ca_key);
        let signed = |name: &str, hosts: &[&str], usage| -> Result<(String, String)> {
            let mut params = named(name, hosts)?;
            params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate().map_err(failed)?;
            let certificate = params.signed_by(&key, &issuer).map_err(failed)?;
            Ok((certificate.pem(), key.serialize_pem()))
        };
        let (certificate, key) = signed("etcd", &[host], ExtendedKeyUsagePurpose::ServerAuth)?;
        let server = Server { certificate, key };
        let (certificate, key) = signed("rekindle", &[], ExtendedKeyUsagePurpose::ClientAuth)?;
        Ok((Handout { format: FORMAT, endpoints: vec![endpoint], ca: ca_certificate.pem(), certificate, key }, server))
    }

    /// The certificate of the authority, as PEM.
    pub(crate) fn ca(&self) -> &str {
        &self.ca
    }

    /// The options for a connection with it.
    #[must_use]
    pub fn options(&self, prefix: impl Into<String>) -> Options {
        let mut options = Options::new(self.endpoints.clone(), prefix);
        options.ca = Some(Secret::Text(self.ca.clone()));
        options.identity = Some((Secret::Text(self.certificate.clone()), Secret::Text(self.key.clone())));
        options
    }

    /// Writes the file for the others, durably. Only its owner can read it.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, file: &(impl Place + AsRef<Path> + ?Sized)) -> Result<()> {
        let written =
            serde_json::to_vec(self).map_err(std::io::Error::other).and_then(|text| write_file(file, &text, 0o600));
        let shown = file.as_ref().display();
        written.map_err(|error| Error::Local(format!("cannot write the address of etcd, {shown}: {error}")))
    }

    /// Reads it; `None` if there is none (yet).
    ///
    /// # Errors
    /// If the file cannot be read, has another format, or may have been written by another user.
    pub fn read(file: &(impl Place + AsRef<Path> + ?Sized)) -> Result<Option<Handout>> {
        let shown = file.as_ref().display();
        let failed = |why: String| Error::Local(format!("cannot use the address of etcd, {shown}: {why}"));
        let opened = file.place().and_then(|place| {
            let parent = place.parent().ok_or(std::io::ErrorKind::InvalidInput)?.metadata()?;
            Ok((place.read()?, parent))
        });
        let (file, folder) = match opened {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|error| failed(error.to_string()))?,
        };
        let metadata = file.metadata().map_err(|error| failed(error.to_string()))?;
        // Over NFS, root may appear as another user: then the store belongs to that user too.
        let ours = [euid(), 0, folder.uid()];
        if !ours.contains(&metadata.uid()) {
            let other = metadata.uid();
            return Err(failed(format!("it belongs to user {other}, not to this user or the store's. Remove it")));
        }
        if metadata.mode() & 0o077 != 0 {
            let mode = metadata.mode() & 0o777;
            return Err(failed(format!(
                "others can read or write it (mode {mode:o}). Remove it, and start rank 0 again"
            )));
        }
        let mut text = Vec::new();
        file.take(MOST).read_to_end(&mut text).map_err(|error| failed(error.to_string()))?;
        let handout: Handout = serde_json::from_slice(&text).map_err(|error| failed(error.to_string()))?;
        if handout.format != FORMAT {
            return Err(failed(format!(
                "its format is {}, and this version knows {FORMAT}. Use the same version everywhere",
                handout.format
            )));
        }
        Ok(Some(handout))
    }
}

fn euid() -> u32 {
    rustix::process::geteuid().as_raw()
}
