//! Tokens of users: `perigee_ID_SECRET`. The secret has 256 random bits and is shown once. Only the SHA-256 of the whole
//! token is kept.

use perigee_http::certificate::{fingerprint, hex};
use perigee_model::limits::{ACCESS_TOKEN_S, ACCESS_TOKENS};
use perigee_model::secret::{TOKEN_PREFIX, without_tokens};
use perigee_model::tenant::{AccessToken, MadeAccessToken};
use perigee_model::{Problem, TenantName, UserName};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::cluster::accounts::{TokenRecord, UsedToken, token_key};

const ID_BYTES: usize = 8;
const SECRET_BYTES: usize = 32;

/// Random bytes for a secret.
pub(super) fn random_bytes<const N: usize>(what: &str) -> Result<[u8; N], Problem> {
    let mut bytes = [0; N];
    getrandom(&mut bytes[..], GetRandomFlags::empty())
        .map_err(|error| Problem::internal(what, format!("no random numbers: {error}")))?;
    Ok(bytes)
}

fn random<const N: usize>() -> Result<String, Problem> {
    Ok(hex(&random_bytes::<N>("can't make a token")?))
}

/// Makes a token of a user. One that the user asks for with a token ends with that one, so that a stolen token does not
/// outlive its end.
///
/// # Errors
/// `NotFound` without such a user; `Invalid` beyond a limit; `Forbidden` if the user's token is not good any more.
pub async fn make_token(
    cluster: &Cluster,
    tenant: &TenantName,
    user: &UserName,
    life_s: u64,
    by: Option<&UsedToken>,
) -> Result<MadeAccessToken, Problem> {
    let what = format!("can't make a token for {tenant}/{user}");
    ACCESS_TOKEN_S.check(life_s).map_err(|e| e.problem(&what))?;
    let _turn = cluster.accounts.turn.lock().await;
    check_used(cluster, &what, by.map(|by| by.id.as_str()))?;
    cluster.accounts.user(tenant, user)?;
    let mut over = tokens_of(cluster, tenant, user);
    // It is refused when the clock says so, and forgotten only when so much time was seen to pass.
    over.retain(|token| {
        let life_ms = token.expires_ms.saturating_sub(token.created_ms);
        token.expires_ms <= now_ms() && cluster.clock.age_ms(token.created_ms) >= life_ms
    });
    // A token that has made another one may be over too, and then its keys go on to its own maker.
    while hand_on_keys(cluster, tenant, user, &over).await? {}
    for token in over {
        forget(cluster, &token.id).await?;
    }
    let count = tokens_of(cluster, tenant, user).len() + 1;
    ACCESS_TOKENS
        .check(count)
        .map_err(|e| e.problem(&what).next("revoke one that is not used: perigee token revoke"))?;
    let id = random::<ID_BYTES>()?;
    let token = format!("{TOKEN_PREFIX}{id}_{}", random::<SECRET_BYTES>()?);
    let created_ms = now_ms();
    let expires_ms = created_ms.saturating_add(life_s.saturating_mul(1000));
    let expires_ms = by.map_or(expires_ms, |by| expires_ms.min(by.expires_ms));
    let record = TokenRecord {
        id: id.clone(),
        tenant: tenant.clone(),
        user: user.clone(),
        sha256: fingerprint(token.as_bytes()),
        created_ms,
        expires_ms,
        made_by: by.map(|by| by.id.clone()),
    };
    cluster.records.put(&token_key(&id), &record).await?;
    cluster.accounts.write().tokens.insert(id.clone(), record);
    let is_secure = cluster.network.identity().is_some();
    let fingerprint = is_secure.then(|| cluster.authority.fingerprint().to_owned());
    let controller_url = cluster.settings.own_url.as_ref().filter(|_| is_secure).cloned();
    Ok(MadeAccessToken { token, id, expires_ms, fingerprint, controller_url })
}

/// A token may be revoked while the request that it has sent waits for its turn. What that made would not be found any more
/// as made with it. The caller has the turn.
///
/// # Errors
/// `Forbidden`.
pub fn check_used(cluster: &Cluster, what: &str, id: Option<&str>) -> Result<(), Problem> {
    if id.is_none_or(|id| cluster.accounts.by_token_id(id).is_some()) {
        return Ok(());
    }
    Err(Problem::forbidden(what, "the token that asks for it is not good any more"))
}

/// A user's tokens, the oldest first.
pub fn tokens_of(cluster: &Cluster, tenant: &TenantName, user: &UserName) -> Vec<AccessToken> {
    let inner = cluster.accounts.read();
    let own = inner.tokens.values().filter(|t| (&t.tenant, &t.user) == (tenant, user));
    let mut tokens: Vec<AccessToken> = own
        .map(|t| AccessToken {
            id: t.id.clone(),
            created_ms: t.created_ms,
            expires_ms: t.expires_ms,
        })
        .collect();
    tokens.sort_by_key(|token| token.created_ms);
    tokens
}

/// Revokes a token, and the tokens and SSH keys that were made with it.
///
/// # Errors
/// `NotFound`.
pub async fn revoke_token(
    cluster: &Cluster,
    tenant: &TenantName,
    user: &UserName,
    id: &str,
) -> Result<(), Problem> {
    let _turn = cluster.accounts.turn.lock().await;
    if !tokens_of(cluster, tenant, user).iter().any(|token| token.id == id) {
        let id: String = without_tokens(id).chars().take(80).collect();
        return Err(Problem::not_found(format!("token {id}"), "the user has no such token")
            .next("`perigee token list` shows the tokens"));
    }
    let ids = with_made_by(cluster, id);
    let mut owner = cluster.accounts.user(tenant, user)?;
    let before = owner.keys.len();
    owner.keys.retain(|key| !key.by_token.as_ref().is_some_and(|by| ids.contains(by)));
    if owner.keys.len() < before {
        super::save_user(cluster, &owner).await?;
    }
    // The token itself comes last: if the store fails, it can be revoked again.
    for id in ids.iter().rev() {
        forget(cluster, id).await?;
    }
    Ok(())
}

/// The SSH keys that were added with a token that is over are revoked with the token that has made it. Returns whether there
/// were any. The caller has the turn.
async fn hand_on_keys(
    cluster: &Cluster,
    tenant: &TenantName,
    user: &UserName,
    over: &[AccessToken],
) -> Result<bool, Problem> {
    let mut owner = cluster.accounts.user(tenant, user)?;
    let mut has_some = false;
    for key in &mut owner.keys {
        let Some(by) = key.by_token.as_ref().filter(|by| over.iter().any(|o| o.id == **by)) else {
            continue;
        };
        let made_by = |token: &TokenRecord| token.made_by.clone();
        let maker = cluster.accounts.read().tokens.get(by).and_then(made_by);
        if maker.is_some() {
            (key.by_token, has_some) = (maker, true);
        }
    }
    if has_some {
        super::save_user(cluster, &owner).await?;
    }
    Ok(has_some)
}

/// The id of a token, and those of the tokens that were made with it, and with these.
fn with_made_by(cluster: &Cluster, id: &str) -> Vec<String> {
    let inner = cluster.accounts.read();
    let mut ids = vec![id.to_owned()];
    let mut next = 0;
    while let Some(maker) = ids.get(next).cloned() {
        let made = inner.tokens.values().filter(|token| token.made_by.as_ref() == Some(&maker));
        ids.extend(made.map(|token| token.id.clone()));
        next += 1;
    }
    ids
}

/// As if its time were over.
#[cfg(test)]
pub fn expire(cluster: &Cluster, id: &str) {
    if let Some(token) = cluster.accounts.write().tokens.get_mut(id) {
        token.expires_ms = 0;
    }
}

async fn forget(cluster: &Cluster, id: &str) -> Result<(), Problem> {
    cluster.records.remove(&token_key(id)).await?;
    cluster.accounts.write().tokens.remove(id);
    Ok(())
}

/// All tokens of a user. The caller has the turn.
pub async fn forget_all(
    cluster: &Cluster,
    tenant: &TenantName,
    user: &UserName,
) -> Result<(), Problem> {
    for token in tokens_of(cluster, tenant, user) {
        forget(cluster, &token.id).await?;
    }
    Ok(())
}
